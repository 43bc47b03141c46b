"""Options of a wrong type or out of their range: the message names field, value and what is wanted."""

import dataclasses

import numpy as np
import pytest

from precast.runtime.request import RequestError, SamplingParams

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "value", ["2", 5.5, object(), {1, 2}, [None], [[1]], {"a": 1}, b"x", float("nan"), pytest.param(10**400, id="huge")]
)
def test_no_type_gets_past_unnamed(field, value):
    try:
        SamplingParams(**{"max_tokens": 5, field: value}).validate(320)
    except RequestError as error:
        assert str(error).startswith(field) and len(str(error)) < 200
    else:
        fits = {str: {"stop"}, int: {"top_k", "max_tokens"}, float: {"temperature", "repetition_penalty"}}
        assert field in fits[type(value)]


@pytest.mark.parametrize(
    "field", sorted(set(FIELDS) - {"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"})
)
def test_a_truth_value_is_no_number(field):
    with pytest.raises(RequestError, match=f"^{field} is True: it must be "):
        SamplingParams(**{field: True}).validate(320)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 5}, "stop is 5: it must be a string or a list of strings"),
        ({"n": "2"}, "n is '2': it must be an integer from 1 to 64"),
        ({"ignore_eos": 1}, "ignore_eos is 1: it must be True or False"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12': it must be a list of token ids"),
        ({"logit_bias": [(1, 2.0)]}, r"logit_bias is \[\(1, 2.0\)\]: it must be a dictionary of token ids and numbers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias contains '5': ids must be integers from 0 to 319"),
        ({"temperature": "hot"}, r"temperature is 'hot': it must be a number in \[0, 1e\+09\]"),
        ({"top_p": 0}, r"top_p is 0: it must be a number in \(0, 1\]"),
        ({"logprobs": True}, "logprobs is True: it must be an integer from 0 to 20"),
    ],
)
def test_messages(options, message):
    with pytest.raises(RequestError, match=f"^{message}$"):
        SamplingParams(**options).validate(320)


def test_numpy_values_are_taken_as_pythons():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        seed=np.int64(2**63 - 1),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int32(3): np.float32(1.0)},
    )
    params.validate(320)
    assert (params.n, params.seed + 1, params.ignore_eos, params.stop_token_ids) == (2, 2**63, True, [3, 4])
