"""``runtime-export``: a model's functions as files that JAX alone can run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from precast.kernels_pallas.targets import GPU_CHIPS, TPU_CHIPS, Target
from precast.models import layout
from precast.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from precast.runtime import files
from precast.runtime.config import DTYPES, ConfigError
from precast.runtime.exported_weights import WeightWriter
from precast.runtime.exporting import Exporter, ExportShapes
from precast.server import command, demo, environment, export_example

_COMMAND = "runtime-export"
_SUMMARY = """
usage: runtime-export --model M --out DIR [flags]

Writes prefill, decode and the sampler of a model as jax.export artefacts, one set a platform, its weights as
safetensors, and an example that runs them without precast. DIR must not exist yet or be empty.
"""
_README = """# {model}, exported

Functions and weights that need JAX and safetensors to run, and nothing of precast.

```bash
pip install jax flatbuffers safetensors    # flatbuffers: of jax.export
python example.py --token_ids 1,2,3 --steps 16
```

`example.py` is short: read it to see how the files go together. `export.json` lists the functions of each platform, the
tensors that their weights are made of, and the arrays of the cache. Platforms: {platforms}.

```
prefill(weights, cache, token_ids [{batch}, {prefill_tokens}], starts [{batch}], lengths [{batch}])
    -> logits [{batch}, {vocab_size}], cache
decode(weights, cache, token_ids [{batch}], positions [{batch}])
    -> logits [{batch}, {vocab_size}], cache
sample(logits [{batch}, {vocab_size}], options)
    -> token_ids [{batch}]
```

- weights, cache: lists of arrays; a new cache is zeros. Donate it, as the example does, or each call copies it. It
  holds {max_tokens} tokens a sequence: a later one is not kept, its logits are no numbers, and sample gives -1 for it.
- prefill reads up to {prefill_tokens} tokens of each sequence, from position starts on; longer prompts take several
  calls. Pad token_ids at the end; lengths counts what is not padding. The logits are those after each last token.
- options: temperature (0 is greedy), top_k (0 is off), top_p (1 is off), min_p (0 is off), num_sampled (tokens drawn
  before: with the seed, it makes the random number) [{batch}]; seed [{batch}, 2] uint32.
- Integers are int32, logits and real options float32, weights and cache as `export.json` says.

Written by JAX {jax}. JAX promises to load such files for six months after that version. It does not promise it for
the kernels inside the NVIDIA files: run those with this version, and import jax.experimental.mosaic.gpu first, as the
example does.
"""


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    shapes = ExportShapes()
    flags.DEFINE_string(
        "model", None, "Hugging Face directory, GGUF file, converted directory, hub id or 'demo'.", values
    )
    flags.DEFINE_string("out", None, "Folder to write.", values)
    flags.DEFINE_list("platforms", ["cpu"], "Any of cpu, tpu:CHIP and cuda:CHIP, such as tpu:v6e,cuda:h200.", values)
    flags.DEFINE_enum("dtype", "auto", DTYPES, "Of weights and cache; auto follows the checkpoint.", values)
    flags.DEFINE_bool("weights", True, "Write the weights too.", values)
    flags.DEFINE_integer("batch", shapes.batch, "Sequences at a time.", flag_values=values)
    flags.DEFINE_integer(
        "prefill_tokens", shapes.prefill_tokens, "Prompt tokens a call of prefill.", flag_values=values
    )
    flags.DEFINE_integer(
        "max_tokens", None, "Room for one sequence; unless given 512, or what the model takes.", flag_values=values
    )
    flags.DEFINE_integer("page_size", shapes.page_size, "Tokens a page of the cache.", flag_values=values)
    return values


def main(argv: Sequence[str] | None = None) -> None:
    """Exports one model; ends the program with one line when it cannot.

    Args:
      argv: arguments without the program's name; None takes the process's own.
    """
    values = _define_flags()
    rest = command.parse(_COMMAND, _SUMMARY, values, argv)
    if rest or values.model is None or values.out is None:
        command.fail(_COMMAND, f"it takes --model and --out{', not ' + rest[0] if rest else ''} (--help says more)", 2)
    out = pathlib.Path(values.out)
    try:
        targets = parse_platforms(values.platforms)
        is_demo = values.model == "demo"
        checkpoint = open_checkpoint(str(demo.fetch(environment.cache_dir())) if is_demo else values.model)
        max_tokens = values.max_tokens
        if max_tokens is None:
            max_tokens = min(ExportShapes.max_tokens, checkpoint.config.max_position_embeddings)
        shapes = ExportShapes(values.batch, values.prefill_tokens, max_tokens, values.page_size)
        export_model(checkpoint, out, targets, shapes, values.dtype, with_weights=values.weights)
    except (CheckpointError, ConfigError, demo.DemoError, NotImplementedError) as error:
        command.fail(_COMMAND, str(error))
    except OSError as error:
        command.fail(_COMMAND, f"{out} cannot be written: {error.strerror or error}")
    print(f"wrote {out.resolve()}: python {out / 'example.py'} runs it")


def run() -> None:
    """Console entry point."""
    # Nothing runs here, so no accelerator is asked for: the functions are only traced.
    jax.config.update("jax_platforms", "cpu")
    main()


def parse_platforms(names: Sequence[str]) -> list[Target]:
    """Reads "cpu", "tpu:v6e" and "cuda:h200"; raises ConfigError that names the part."""
    chips = {"tpu": TPU_CHIPS, "cuda": GPU_CHIPS}
    targets: dict[str, Target] = {}
    for name in names:
        platform, _, chip = name.strip().partition(":")
        if platform not in ("cpu", *chips):
            raise ConfigError(f"platforms has {name!r}: it must be cpu, tpu:CHIP or cuda:CHIP")
        if platform in targets:
            raise ConfigError(f"platforms has {name!r}: a folder holds one set of functions for each platform")
        if platform == "cpu" and not chip:
            targets[platform] = Target("cpu")
        elif chip in chips.get(platform, {}):
            targets[platform] = Target("gpu" if platform == "cuda" else platform, chip)
        else:
            legal = [f"{platform}:{chip}" for chip in chips[platform]] if platform in chips else ["cpu"]
            raise ConfigError(f"platforms has {name!r}: it must be one of {', '.join(legal)}")
    if not targets:
        raise ConfigError("platforms is empty: name at least one, such as cpu")
    return list(targets.values())


def export_model(
    checkpoint: Checkpoint,
    out: pathlib.Path,
    targets: Sequence[Target],
    shapes: ExportShapes,
    dtype: str = "auto",
    *,
    with_weights: bool = True,
) -> None:
    """Writes the folder; it appears under its name only when it is complete.

    Raises:
      ConfigError: settings that do not fit the model, or a folder with something in it.
      CheckpointError: the weights cannot be read.
      NotImplementedError: what a target's kernels do not cover; the message names the limit.
    """
    config = checkpoint.config
    if shapes.max_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"max_tokens is {shapes.max_tokens}: the model is made for at most {config.max_position_embeddings}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out is {out}: something is there already; choose another folder")
    if dtype == "auto":
        dtype = config.dtype if config.dtype in DTYPES else "bfloat16"
    exporters = [Exporter(config, target, shapes, dtype) for target in targets]
    with files.replacing_folder(out) as folder:
        # Before the weights: a kernel's refusal should not take long to come.
        functions = [_write_functions(folder, exporter) for exporter in exporters]
        writer = WeightWriter(folder / "weights" if with_weights else None)
        platforms: dict[str, Any] = {}
        for exporter, names in zip(exporters, functions, strict=True):
            platforms[exporter.platform] = {
                "target": ":".join(filter(None, (exporter.platform, exporter.target.chip))),
                "functions": names,
                "weights": writer.add(exporter, _weights(checkpoint, exporter) if with_weights else exporter.weights),
                "cache": [{"shape": one.shape, "dtype": one.dtype.name} for one in jax.tree.leaves(exporter.cache)],
            }
        writer.flush()
        about = {"model": checkpoint.name, "vocab_size": config.vocab_size, "dtype": dtype, "jax": jax.__version__}
        about |= dataclasses.asdict(shapes)
        (folder / "export.json").write_text(json.dumps(about | {"platforms": platforms}, indent=1))
        listed = ", ".join(one["target"] for one in platforms.values())
        (folder / "README.md").write_text(_README.format(**about, platforms=listed))
        shutil.copyfile(export_example.__file__, folder / "example.py")


def _write_functions(folder: pathlib.Path, exporter: Exporter) -> dict[str, str]:
    """The files of one platform's functions, by the functions' names."""
    written = {}
    for name, content in exporter.artefacts().items():
        path = folder / exporter.platform / f"{name}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        written[name] = f"{exporter.platform}/{path.name}"
    return written


def _weights(checkpoint: Checkpoint, exporter: Exporter) -> Any:
    checkpoint.check()
    with tqdm(total=checkpoint.config.num_layers, desc=f"weights for {exporter.platform}", unit="layer") as bar:
        return layout.build(
            checkpoint.config, checkpoint.read, dtype=exporter.dtype, num_positions=exporter.shapes.max_tokens,
            placement=exporter.placement, on_layer=bar.update,
        )  # fmt: skip
