"""The examples run, on a small model."""

import pathlib
import runpy
import sys

import numpy as np
import tiny_model

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_attention_entropy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attention_entropy.py", str(tiny_model.write(tmp_path / "model"))])
    result = runpy.run_path(str(EXAMPLES / "attention_entropy.py"), run_name="__main__")
    measured = np.array(result["measured"])
    assert measured.shape == (48, 2, 4)
    assert (measured > 0).all() and (measured < 1).all() and measured.std(axis=0).min() > 0
    assert "narrowest: layer" in capsys.readouterr().out
