"""The files from which a client builds the server's tokenizer: what GetTokenizer sends."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a client has a bundle without a checkpoint
    from precast.models.checkpoint.base import TextAssets

_NAMES = ("tokenizer.json", "tokenizer_config.json", "config.json")


@dataclasses.dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer and the two configurations that go with it, as in a Hugging Face folder.

    ``tokenizer_config`` holds the chat template too, and in ``add_bos_token`` whether a raw
    prompt gets a begin token.
    """

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def of(cls, text: TextAssets) -> TokenizerBundle:
        """The bundle of a checkpoint's tokenizer."""
        config = {**text.tokenizer_config, "add_bos_token": text.add_bos}
        if text.chat_template is not None:
            config["chat_template"] = text.chat_template
        return cls(text.tokenizer_json, config, text.config_json)

    def zip(self) -> bytes:
        """The archive; equal bundles give equal bytes, so that its digest identifies it."""
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            for name, content in self._files().items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=1)
        return data.getvalue()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files, as libraries that load a tokenizer from a folder expect them."""
        os.makedirs(folder, exist_ok=True)
        for name, content in self._files().items():
            pathlib.Path(folder, name).write_text(content, encoding="utf-8")

    def _files(self) -> dict[str, str]:
        contents = (self.tokenizer_json, _dump(self.tokenizer_config), _dump(self.config))
        return dict(zip(_NAMES, contents, strict=True))

    @classmethod
    def unzip(cls, data: bytes) -> TokenizerBundle:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            tokenizer_json, tokenizer_config, config = (archive.read(name).decode() for name in _NAMES)
        return cls(tokenizer_json, json.loads(tokenizer_config), json.loads(config))


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
