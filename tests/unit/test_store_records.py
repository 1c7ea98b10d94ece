"""Records hold what a model may write, exactly; the tables exist in both dialects."""

from __future__ import annotations

import math

import msgspec
import pytest
from sqlalchemy import Dialect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateTable

from mgrpo.store.records import GroupHead, Member, decode_head, decode_metrics, decode_sample, encode
from mgrpo.store.schema import metadata
from mgrpo.store.sql import _insert_new
from mgrpo.types import Failure, Reply, Reward, Sample, Task, ToolCall, Trajectory, TrajectoryId, Turn


def sample(arguments: dict[str, object], text: str = "") -> Sample:
    reply = Reply(calls=(ToolCall("search", arguments),))
    turns = (Turn((1,), (2, 3), (-0.1, -1e-300), 4, "length", text, reply),)
    return Sample(Trajectory(TrajectoryId(1, 2, "searcher", 3), text, turns, "max_turns"), Reward(None, {}, "why"))


@pytest.mark.parametrize(
    "written",
    [
        sample({"count": 10**40, "below": -(2**63) - 1}),
        sample({"query": "half a pair \ud800"}, text="\udfff"),
        sample({"query": "\x00\x07\x1b[31m", "nested": [{"a": None}, True, 2**64 - 1]}, text="\x00"),
        sample({"plain": 1.5}),
    ],
    ids=["integers beyond 64 bits", "unpaired surrogates", "control characters", "plain"],
)
def test_whatever_a_model_writes_comes_back(written: Sample) -> None:
    assert decode_sample(encode(written)) == written


def test_floats_are_exact() -> None:
    values = {"third": 0.1 + 0.2, "tiny": 5e-324, "huge": 1.7976931348623157e308, "below": -0.0, "inf": -math.inf}
    decoded = decode_metrics(encode(values))
    assert decoded == values and math.copysign(1.0, decoded["below"]) == -1.0
    assert math.isnan(decode_metrics(encode({"loss": math.nan}))["loss"])


def test_a_group_head_keeps_order_and_failures() -> None:
    head = GroupHead(
        Task("t", "q?", info={"hops": 2, "z": 10**30}), (Member(3, 0, Failure("ToolError", "503")), Member(0, 2, None))
    )
    assert decode_head(encode(head)) == head


def test_bytes_of_another_type_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_sample(encode({"loss": 1.0}))


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(TypeError):
        encode(object())


DIALECTS: list[Dialect] = [sqlite.dialect(), postgresql.dialect()]  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dialect", DIALECTS, ids=["sqlite", "postgresql"])
def test_every_table_compiles_with_wide_keys(dialect: Dialect) -> None:
    ddl = "".join(str(CreateTable(table).compile(dialect=dialect)) for table in metadata.sorted_tables)
    assert ddl.count("CREATE TABLE") == len(metadata.tables)
    assert ("group_id BIGINT" in ddl) == (dialect.name == "postgresql")
    assert "SERIAL" not in ddl


@pytest.mark.parametrize("dialect", DIALECTS, ids=["sqlite", "postgresql"])
def test_a_known_group_is_left_alone_by_the_database_itself(dialect: Dialect) -> None:
    statement = str(_insert_new(dialect.name).compile(dialect=dialect))
    assert "ON CONFLICT (id) DO NOTHING RETURNING" in statement.replace("\n", " ").replace("  ", " ")
