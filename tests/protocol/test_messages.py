"""Messages: what goes in comes out, anybody can read it, and nothing malformed gets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.sections.data_config import SamplingSection
from slipstream.errors import MessageError
from slipstream.protocol import frames as limits
from slipstream.protocol.messages import (
    MAX_HEAD,
    SCHEMA,
    Group,
    GroupArrays,
    Sample,
    check_group,
    decode_group,
    decode_header,
    encode_group,
    encode_header,
    encode_scored,
    expand_versions,
)
from slipstream.protocol.questions import EvaluationResult, Fetch, Found, Offer, Offered, Stored

GOLDEN_HEADER = {
    "run": "r",
    "ticket": 7,
    "attempt": 1,
    "prompt_index": 3,
    "owner": "rollout-0",
    "admitted_version": 4,
    "samples": [
        {
            "tokens": 3,
            "finish": "stop",
            "versions": [[4, 2], [5, 1]],
            "text": "né",
            "reward": 1.0,
            "components": {"math": 1.0, "style": None},
            "unscored": "",
            "kept_cache": False,
        },
        {
            "tokens": 0,
            "finish": "abort",
            "versions": [],
            "text": "",
            "reward": None,
            "components": {},
            "unscored": "timeout",
            "kept_cache": False,
        },
    ],
    "kind": "train",
    "epoch": 2,
    "prompt": "1 + 1 =",
    "columns": {"answer": "2", "nested": [1, {"a": 0.5}], "none": None},
    "head": 0,
    "job": "",
    "generate_seconds": 0.25,
    "score_seconds": 0.0,
    "digest": "85db48e7f9f984f7f427b8c3c13ea38f",
    "score_digest": "460bfba2d4165195",
    "schema": 3,
}
GOLDEN_FRAMES = (
    bytes.fromhex("01000000 02000000"),
    bytes.fromhex("0a000000 0b000000 ffffff7f"),
    bytes.fromhex("000000bf 000080bf 00000080"),  # -0.5, -1.0, -0.0
)


def group(**changes: Any) -> Group:
    return msgspec.convert({**GOLDEN_HEADER, **changes}, Group)


def arrays(**changes: Any) -> GroupArrays:
    given = {
        "prompt_ids": np.array([1, 2], dtype=np.int32),
        "token_ids": np.array([10, 11, 2**31 - 1], dtype=np.int32),
        "logprobs": np.array([-0.5, -1.0, -0.0], dtype=np.float32),
    }
    return GroupArrays(**{**given, **changes})


def sample(**changes: Any) -> dict[str, Any]:
    first: dict[str, Any] = GOLDEN_HEADER["samples"][0]  # type: ignore[index]
    return {**first, **changes}


def wire(**changes: Any) -> list[bytes]:
    """Frames as another program could send them, changed before they leave."""
    return [msgpack.packb({**GOLDEN_HEADER, **changes}), *GOLDEN_FRAMES]


def test_a_group_comes_back_as_it_was() -> None:
    header, read = decode_group(encode_group(group(), arrays()))
    assert header == group()
    np.testing.assert_array_equal(read.prompt_ids, arrays().prompt_ids)
    np.testing.assert_array_equal(read.token_ids, arrays().token_ids)
    assert read.logprobs.tobytes() == arrays().logprobs.tobytes()


def test_any_msgpack_client_can_read_a_group() -> None:
    frames = encode_group(group(), arrays())
    assert msgpack.unpackb(frames[0]) == GOLDEN_HEADER
    assert tuple(bytes(frame) for frame in frames[1:]) == GOLDEN_FRAMES


def test_any_msgpack_client_can_write_a_group() -> None:
    header, read = decode_group(wire())
    assert header == group()
    assert read.token_ids.tolist() == [10, 11, 2**31 - 1]


def test_any_msgpack_client_can_seal_a_group() -> None:
    """As docs/architecture.md says: MessagePack of lists of the header's fields, and the arrays behind it."""
    head = GOLDEN_HEADER
    made = [
        [each[name] for name in ("tokens", "finish", "versions", "text", "kept_cache")]
        for each in head["samples"]  # type: ignore[attr-defined]
    ]
    identity = [head[name] for name in ("run", "kind", "job", "ticket", "attempt", "owner", "epoch")]
    asked = [head[name] for name in ("prompt_index", "prompt", "columns", "admitted_version", "head")]
    state = xxhash.xxh3_128(msgpack.packb([identity, asked, head["generate_seconds"], made]))
    for array in GOLDEN_FRAMES:
        state.update(array)
    scores = [[each[name] for name in ("reward", "components", "unscored")] for each in head["samples"]]  # type: ignore[attr-defined]
    scored = xxhash.xxh3_64(msgpack.packb([state.hexdigest(), head["score_seconds"], scores]))
    assert (head["digest"], head["score_digest"]) == (state.hexdigest(), scored.hexdigest())


def test_the_header_has_the_golden_bytes() -> None:
    """The wire may not change without a new schema number."""
    fetch = Fetch(run="r", learner="l", tickets=[1, 2, 3])
    expected = b"\x84\xa3run\xa1r\xa7learner\xa1l\xa7tickets\x93\x01\x02\x03\xa6schema\x03"
    assert encode_header(fetch) == expected
    assert decode_header(expected, Fetch) == fetch


def test_decoded_arrays_are_views_on_the_frames() -> None:
    frames = [bytes(frame) for frame in encode_group(group(), arrays())]
    _, read = decode_group(frames)
    assert not read.token_ids.flags.owndata
    assert read.token_ids.ctypes.data == np.frombuffer(frames[2], np.uint8).ctypes.data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_frames_of_any_buffer_are_read(kind: Callable[[bytes], Any]) -> None:
    assert decode_group([kind(bytes(frame)) for frame in encode_group(group(), arrays())])[0] == group()


def test_arrays_are_brought_to_the_wire_types() -> None:
    wide = arrays(
        token_ids=np.array([10, 11, 2**31 - 1], dtype=np.int64),
        logprobs=np.array([-0.5, -1.0, -0.0], dtype=np.float64),
        prompt_ids=np.array([1, 9, 2, 9], dtype=np.uint16)[::2],
    )
    assert tuple(bytes(frame) for frame in encode_group(group(), wide)[1:]) == GOLDEN_FRAMES
    swapped = arrays(token_ids=arrays().token_ids.astype(">i4"))
    assert bytes(encode_group(group(), swapped)[2]) == GOLDEN_FRAMES[1]


def test_a_group_of_empty_completions_travels() -> None:
    empty = group(samples=[sample(tokens=0, versions=[])])
    none = arrays(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    header, read = decode_group(encode_group(empty, none))
    assert (header.token_count, len(read.token_ids), len(read.logprobs)) == (0, 0, 0)
    assert header.oldest_version == header.newest_version == 4


def test_a_scored_group_goes_on_with_the_very_arrays_that_came() -> None:
    frames = wire()
    header, read = decode_group(frames)
    header.samples[0].reward, header.samples[0].components = 1.0, {"f": 1.0}
    sent = encode_scored(header, frames)
    assert all(after is before for after, before in zip(sent[1:], frames[1:], strict=True))
    again, arrays_again = decode_group(sent)
    assert again.samples[0].reward == 1.0
    assert arrays_again.logprobs.tolist() == read.logprobs.tolist()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_goes_no_further(number: float) -> None:
    frames = wire()
    header, _ = decode_group(frames)
    header.samples[0].reward = number
    with pytest.raises(MessageError, match=r"samples\[0\].reward: .* is not finite"):
        encode_scored(header, frames)
    header.samples[0].reward, header.samples[0].components = 0.0, {"f": number}
    with pytest.raises(MessageError, match=r"samples\[0\].components.f: .* is not finite"):
        encode_scored(header, frames)


def test_versions_are_read_from_their_run_lengths() -> None:
    assert (group().oldest_version, group().newest_version) == (4, 5)
    assert expand_versions([(4, 2), (5, 1)]).tolist() == [4, 4, 5]
    assert expand_versions([]).tolist() == []


@pytest.mark.parametrize(
    ("rewards", "informative"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([1.0, None], False),
        ([None, None], False),
        ([1.0, None, 0.5], True),
    ],
)
def test_a_group_is_informative_when_its_scored_rewards_differ(
    rewards: list[float | None], informative: bool
) -> None:
    assert group(samples=[sample(reward=reward) for reward in rewards]).informative is informative


# What is refused, on the way out and on the way in.

MISFITS = [
    ({"logprobs": np.array([-1.0, -1.0], np.float32)}, "logprobs: 2 logprobs for 3 tokens; never padded"),
    ({"token_ids": np.array([1, 2], np.int32)}, "token_ids: 2 ids for 3 tokens"),
    ({"logprobs": np.array([-1.0, np.nan, -1.0], np.float32)}, r"logprobs\[1\]: nan is not finite"),
    ({"logprobs": np.array([-1.0, -1.0, -np.inf], np.float32)}, r"logprobs\[2\]: -inf is not finite"),
    ({"token_ids": np.array([1, -5, 2], np.int32)}, r"token_ids\[1\]: -5 is no token id"),
    ({"prompt_ids": np.array([-1], np.int32)}, r"prompt_ids\[0\]: -1 is no token id"),
]
OUTGOING = [
    *MISFITS,
    ({"logprobs": np.array([-1.0, -1e300, -1.0])}, r"logprobs\[1\]: -inf is not finite"),
    ({"token_ids": np.array([1, 2**31, 2])}, r"token_ids\[1\]: 2147483648 is no token id"),
    ({"token_ids": np.array([1.0, 2.5, 3.0])}, "token_ids: float64 values, whole numbers expected"),
    ({"logprobs": np.array([1, 2, 3])}, "logprobs: int64 values, floats expected"),
    ({"logprobs": np.zeros((3, 1), np.float32)}, "logprobs: 2 dimensions, one expected"),
    ({"token_ids": np.zeros((3, 2), np.int32)}, "token_ids: 2 dimensions, one expected"),
]


@pytest.mark.parametrize(("changes", "says"), OUTGOING)
def test_arrays_that_do_not_fit_are_refused_on_the_way_out(changes: dict[str, Any], says: str) -> None:
    """Cases 39 and 109."""
    with pytest.raises(MessageError, match=says):
        encode_group(group(), arrays(**changes))


@pytest.mark.parametrize(("changes", "says"), MISFITS)
def test_arrays_that_do_not_fit_are_refused_on_the_way_in(changes: dict[str, Any], says: str) -> None:
    """Cases 39 and 109."""
    sent = arrays(**changes)
    frames = [wire()[0], sent.prompt_ids.tobytes(), sent.token_ids.tobytes(), sent.logprobs.tobytes()]
    with pytest.raises(MessageError, match=says):
        decode_group(frames)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": []}, "samples: 0 samples, 1 to 4096 allowed"),
        ({"samples": [sample(tokens=4)]}, r"samples\[0\].versions: stamps 3 tokens, the sample has 4"),
        ({"samples": [sample(versions=[[4, 3], [5, 0]])]}, r"samples\[0\].versions: .* counts > 0"),
        ({"samples": [sample(reward=float("nan"))]}, r"samples\[0\].reward: nan is not finite"),
        ({"samples": [sample(), sample(reward=float("inf"))]}, r"samples\[1\].reward: inf is not finite"),
        ({"samples": [sample(components={"a": float("-inf")})]}, r"samples\[0\].components.a: -inf"),
        ({"generate_seconds": float("nan")}, "generate_seconds: nan is not finite"),
        ({"score_seconds": float("inf")}, "score_seconds: inf is not finite"),
        ({"columns": {"gold": float("nan")}}, "columns.gold: nan is not finite"),
        ({"columns": {"a": [0.5, {"b": [1, float("inf")]}]}}, r"columns.a\[1\].b\[1\]: inf is not finite"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_both_ways(changes: dict[str, Any], says: str) -> None:
    """Case 109."""
    with pytest.raises(MessageError, match=says):
        encode_group(group(**changes), arrays())
    with pytest.raises(MessageError, match=says):
        decode_group(wire(**changes))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"ticket": "7"}, r"\$\.ticket"),
        ({"ticket": -1}, r"\$\.ticket"),
        ({"ticket": 2**63}, r"\$\.ticket"),
        ({"ticket": 1.0}, r"\$\.ticket"),
        ({"admitted_version": -1}, r"\$\.admitted_version"),
        ({"samples": [sample(finish="done")]}, r"\$\.samples\[0\]\.finish"),
        ({"samples": [sample(tokens=-1)]}, r"\$\.samples\[0\]\.tokens"),
        ({"samples": [sample(versions=[[4]])]}, r"\$\.samples\[0\]\.versions"),
        ({"samples": [sample(versions=[[-1, 3]])]}, r"\$\.samples\[0\]\.versions"),
        ({"samples": [sample(reward="1")]}, r"\$\.samples\[0\]\.reward"),
        ({"samples": [sample(extra=1)]}, "unknown field `extra`"),
        ({"samples": None}, r"\$\.samples"),
        ({"kind": "test"}, r"\$\.kind"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"columns": {1: 2}}, r"\$\.columns"),
    ],
)
def test_a_field_of_a_wrong_type_or_name_is_refused_with_its_path(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(MessageError, match=path):
        decode_group(wire(**changes))


def test_a_missing_field_is_named() -> None:
    header = {name: value for name, value in GOLDEN_HEADER.items() if name != "owner"}
    with pytest.raises(MessageError, match="owner"):
        decode_group([msgpack.packb(header), *GOLDEN_FRAMES])


@pytest.mark.parametrize("more", [{}, {"new_field": 1}, {"ticket": "t7"}])
def test_another_schema_is_named_with_both_numbers(more: dict[str, Any]) -> None:
    """Also when its fields have changed, and would be refused first."""
    with pytest.raises(MessageError, match=f"schema 2 received, this process speaks {SCHEMA}"):
        decode_group(wire(schema=2, **more))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Offer(run="r", learner="l"), Offer),
        (Offered(serial=1, ready=[Stored(1, 0, 2, 3, 4, 5, True, 0.5, 6)]), Offered),
        (Fetch(run="r", learner="l", tickets=[1]), Fetch),
        (Found(tickets=[1]), Found),
        (EvaluationResult(reward=1.0, tokens=2, truncated=False, text="t"), EvaluationResult),
        (group(), Group),
    ],
)
def test_every_message_is_refused_by_the_number_of_its_schema(message: msgspec.Struct, kind: type) -> None:
    """Also one that says no number: a field that another release has reordered would be read as another."""
    assert decode_header(encode_header(message), kind) == message
    other = msgpack.unpackb(encode_header(message)) | {"schema": SCHEMA + 1}
    with pytest.raises(MessageError, match=f"schema {SCHEMA + 1} received, this process speaks {SCHEMA}"):
        decode_header(msgpack.packb(other), kind)
    del other["schema"]
    with pytest.raises(MessageError, match=f"no schema received, this process speaks {SCHEMA}"):
        decode_header(msgpack.packb(other), kind)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_wrong_number_of_frames_is_refused(count: int) -> None:
    with pytest.raises(MessageError, match=f"4 frames expected, got {count}"):
        decode_group((wire() * 2)[:count])


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_torn_array_is_refused(index: int) -> None:
    frames = wire()
    frames[index] = frames[index][:-1]
    with pytest.raises(MessageError, match="no whole number of"):
        decode_group(frames)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        wire()[0][:-3],
        wire()[0] + b"\x00",
        b"\x81\xa1\xff\x01",
        b"\x81\x91\x01\x02",
        b"\x91" * 5000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb("text"),
    ],
)
def test_bytes_that_are_no_header_are_refused(header: bytes) -> None:
    with pytest.raises(MessageError):
        decode_group([header, *GOLDEN_FRAMES])


def test_oversized_frames_are_refused_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(wire()[0])
    monkeypatch.setattr("slipstream.protocol.headers.MAX_HEADER_BYTES", size - 1)
    says = f"header: {size} bytes, more than the limit of {size - 1}"
    with pytest.raises(MessageError, match=says):
        encode_group(group(), arrays())
    with pytest.raises(MessageError, match=says):
        decode_group(wire())
    monkeypatch.undo()
    monkeypatch.setattr(limits, "MAX_ARRAY_BYTES", 8)
    with pytest.raises(MessageError, match="token_ids: 3 items, more than the limit of 2"):
        encode_group(group(), arrays())
    with pytest.raises(MessageError, match="token_ids: 12 bytes, more than the limit of 8"):
        decode_group(wire())


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", np.float64(1.0)])
def test_what_cannot_travel_is_a_message_error(value: object) -> None:
    """Case 52: text is mended where it arises; what is left is refused by name, never a crash of the service."""
    with pytest.raises(MessageError, match="group: cannot be encoded"):
        encode_group(group(columns={"x": value}), arrays())


def test_columns_nested_without_end_are_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(MessageError, match="nested deeper than"):
        encode_group(group(columns=loop), arrays())


def test_a_group_is_checked_as_one_story() -> None:
    """Each sample's own count has to fit its versions, also when the sums agree."""
    shifted = group(samples=[sample(tokens=2), sample(tokens=1, versions=[[4, 1]])])
    with pytest.raises(MessageError, match=r"samples\[0\].versions"):
        check_group(shifted, arrays())


# Whatever arrives, it is a group that fits or a MessageError.

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def _read(frames: list[bytes]) -> None:
    try:
        header, read = decode_group(frames)
    except MessageError:
        return
    check_group(header, read)
    assert len(read.token_ids) == sum(len(expand_versions(s.versions)) for s in header.samples)


@given(st.sampled_from(sorted(GOLDEN_HEADER)), values)
def test_a_header_with_any_field_changed_is_read_or_refused(name: str, value: object) -> None:
    _read([msgpack.packb({**GOLDEN_HEADER, name: value}), *GOLDEN_FRAMES])


@given(st.sampled_from(sorted(sample())), values)
def test_a_sample_with_any_field_changed_is_read_or_refused(name: str, value: object) -> None:
    _read(wire(samples=[sample(**{name: value})]))


@given(st.data())
def test_a_flipped_byte_is_found(data: st.DataObject) -> None:
    """Wherever it is: an id 7 that became a 6, a logprob that became another, a reward."""
    frames = wire()
    index = data.draw(st.integers(0, 3))
    position = data.draw(st.integers(0, len(frames[index]) - 1))
    changed = bytearray(frames[index])
    changed[position] ^= data.draw(st.integers(1, 255))
    frames[index] = bytes(changed)
    with pytest.raises(MessageError):
        decode_group(frames)


def test_damaged_arrays_and_damaged_rewards_are_told_apart() -> None:
    frames = wire()
    with pytest.raises(MessageError, match=r"^digest: the group is not what its rollout made"):
        decode_group([*frames[:2], frames[2].replace(b"\x0a", b"\x0b", 1), frames[3]])
    first = sample(reward=0.0)
    with pytest.raises(MessageError, match=r"^score_digest: the rewards are not what was scored"):
        decode_group(wire(samples=[first, GOLDEN_HEADER["samples"][1]]))  # type: ignore[index]


@given(st.lists(st.binary(max_size=64), max_size=6))
def test_random_frames_are_read_or_refused(frames: list[bytes]) -> None:
    _read(frames)


@given(values)
def test_whatever_can_be_encoded_comes_back(value: Any) -> None:
    try:
        frames = encode_group(group(columns={"x": value}), arrays())
    except MessageError:
        return
    assert decode_group(frames)[0].columns == {"x": value}


def test_samples_share_no_defaults() -> None:
    first, second = (Sample(tokens=0, finish="stop", versions=[], text="") for _ in range(2))
    first.components["a"] = 1.0
    assert second.components == {}


HEAD = {
    "head_ids": np.array([[10, 4], [11, 5], [2**31 - 1, 0]], dtype=np.int32),
    "head_logprobs": np.array([[-0.5, -2.0], [-1.0, -1.5], [-0.0, -np.inf]], dtype=np.float32),
}


def test_likeliest_tokens_travel_behind_the_sampled_ones() -> None:
    frames = encode_group(group(head=2), arrays(**HEAD))
    assert len(frames) == 4
    header, read = decode_group(frames)
    assert (header.head, read.token_ids.tolist()) == (2, arrays().token_ids.tolist())
    assert read.logprobs.tobytes() == arrays().logprobs.tobytes()
    for name, values in HEAD.items():
        np.testing.assert_array_equal(getattr(read, name), values)


@pytest.mark.parametrize("head", [MAX_HEAD + 1, 2**40, 2**63 - 1])
def test_a_head_that_no_setting_allows_is_refused_though_there_are_no_tokens(head: int) -> None:
    """Nothing else bounds it then, and no array has such a shape."""
    header = {**GOLDEN_HEADER, "samples": [sample(tokens=0, versions=[])], "head": head}
    with pytest.raises(MessageError, match=r"\$\.head"):
        decode_group([msgpack.packb(header), GOLDEN_FRAMES[0], b"", b""])


def test_the_largest_head_is_the_one_that_the_setting_allows() -> None:
    bound = SamplingSection.model_json_schema()["properties"]["top_logprobs"]["maximum"]
    assert bound == MAX_HEAD


@pytest.mark.parametrize(
    ("head", "changes", "message"),
    [
        (2, {}, "token_ids: 3 items for 3 tokens with 2 likeliest each"),
        (1, HEAD, "token_ids: 9 items for 3 tokens with 1 likeliest each"),
        (0, HEAD, "token_ids: 9 ids for 3 tokens"),
        (2, HEAD | {"head_logprobs": np.full((3, 2), np.nan, np.float32)}, "head_logprobs: NaN or infinity"),
        (2, HEAD | {"head_ids": np.full((3, 2), -1, np.int32)}, r"head_ids\[0\]: -1 is no token id"),
    ],
)
def test_likeliest_tokens_that_do_not_fit_are_refused(head: int, changes: Any, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        encode_group(group(head=head), arrays(**changes))
