"""The project's own checkpoints: a round trip, onto one and several devices, and damaged ones."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny

from precast.models.checkpoint import CheckpointError, open_checkpoint
from precast.models.checkpoint.native import MANIFEST, save
from precast.server import convert


@pytest.fixture
def converted(tmp_path):
    """(source checkpoint, directory of the conversion)"""
    (tmp_path / "source").mkdir()
    weights = tiny.tensors()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(ml_dtypes.bfloat16)
    source = open_checkpoint(tiny.write(tmp_path / "source", weights, rope_scaling={"type": "linear", "factor": 2.0}))
    save(source, str(tmp_path / "native"))
    return source, tmp_path / "native"


def test_round_trip(converted):
    source, directory = converted
    native = open_checkpoint(str(directory))
    assert native.config == source.config and native.names() == source.names() and native.text == source.text
    for name in native.names():
        np.testing.assert_array_equal(native.read(name), source.read(name))
        assert native.read(name).dtype == source.read(name).dtype


_ON_DEVICES = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from precast.models.checkpoint import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
for count in (8, 2, 1):
    mesh = Mesh(np.array(jax.devices()[:count]), "x")
    split = NamedSharding(mesh, PartitionSpec("x"))
    names = [name for name in checkpoint.names() if name.endswith("weight")]
    restored = checkpoint.restore({name: split for name in names})
    for name in names:
        assert restored[name].sharding == split
        np.testing.assert_array_equal(restored[name], checkpoint.read(name))
"""


def test_restores_to_any_number_of_devices(converted):
    _, directory = converted
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _ON_DEVICES, directory], env={**os.environ, **flags}, check=True)


def _largest_array(directory: pathlib.Path) -> pathlib.Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _edit(directory, **changes):
    content = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: os.remove(d / MANIFEST), "conversion was not finished"),
        (lambda d: os.remove(_largest_array(d / "weights")), "1 files are missing or cut short"),
        (lambda d: os.truncate(_largest_array(d / "weights"), 100), "1 files are missing or cut short"),
        (lambda d: (d / MANIFEST).write_text("{"), "not valid JSON"),
        (lambda d: _edit(d, format=99), "format is 99"),
        (lambda d: _edit(d, config={}), "is damaged"),
        (lambda d: _edit(d, arrays={}), "tensors are missing"),
    ],
)
def test_damaged(converted, damage, words):
    _, directory = converted
    damage(directory)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(directory))


def test_convert_command(converted, tmp_path, capsys):
    source, directory = converted
    convert.main([source.path, str(tmp_path / "new")])
    assert open_checkpoint(str(tmp_path / "new")).config == source.config
    for arguments, words in (
        ([source.path, str(directory)], "not empty"),
        ([str(tmp_path / "absent"), str(tmp_path / "other")], "no such file or directory"),
        ([source.path], "MODEL and DIRECTORY"),
    ):
        with pytest.raises(SystemExit) as caught:
            convert.main(arguments)
        assert caught.value.code
        assert words in capsys.readouterr().err.splitlines()[-1]
