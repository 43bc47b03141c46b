"""The demo model (9 heads, 3 KV heads) gives the tokens of one device over 2, 3 and 8, greedy and seeded."""

import json
import pathlib
import subprocess
import sys

import pytest

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "data" / "golden.json").read_text())
RECORDS = [record for record in GOLDEN["records"] if len(record["prompt_ids"]) <= 100][:5]


def tokens(tensor, plan_dir):
    case = pathlib.Path(__file__).with_name("tensor_parallel_case.py")
    prompts = json.dumps([record["prompt_ids"] for record in RECORDS])
    command = [sys.executable, str(case), str(tensor), str(plan_dir), prompts]
    child = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    found = tokens(1, tmp_path_factory.mktemp("plans"))
    assert len(RECORDS) >= 4
    for record, ids in zip(RECORDS, found, strict=False):
        assert ids == record["output_ids"][: len(ids)], record["name"]
    return found


@pytest.mark.parametrize("tensor", [2, 3, 8])
def test_tokens_are_those_of_one_device(tensor, on_one_device, tmp_path):
    assert tokens(tensor, tmp_path) == on_one_device
