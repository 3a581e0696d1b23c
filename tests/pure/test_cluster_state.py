"""State folders of replicas: one each, and none begins without an answer that another has kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculon.core.errors import ConfigError, StateInUse
from speculon.engine import state as state_module
from speculon.engine.state import hold
from speculon.operations.cluster.state import answers, claim, forget, joined, merge
from tests.pure.test_state import Engine, contents, same_versions

__all__ = ["same_versions"]  # a fixture

ONE, TWO, THREE = [4, 5, 6], [7, 8, 9], [10, 11, 12]


def pools(engine: Engine) -> list[list[int]]:
    """The answers of every pool, without the ends of prompts before them."""
    found = [tokens.tolist() for _, (_, _, tokens) in engine.proposers.state()]
    return [[answer[3:-1] for answer in map(list, answers(tokens))] for tokens in found]


def written(folder: Path, *written: tuple[list[int], str], learns: bool = False) -> None:
    engine = Engine(folder)
    for answer, pool in written:
        engine.write(answer, pool)
    if learns:
        engine.learn()
    engine.state.close()


def test_each_replica_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = claim(tmp_path / "state", "demo"), claim(tmp_path / "state", "demo")
    assert [first[0].name, second[0].name] == ["replica-0", "replica-1"]
    first[1].release()
    assert claim(tmp_path / "state", "demo")[0].name == "replica-0"


def test_an_answer_of_any_replica_is_known_to_all(tmp_path: Path) -> None:
    written(tmp_path / "replica-0", (ONE, "me"), (TWO, "me"))
    written(tmp_path / "replica-1", (TWO, "me"), (THREE, "me"), (ONE, "you"), learns=True)
    own, lock = claim(tmp_path, "demo")
    folders = [own, claim(tmp_path, "demo")[0], claim(tmp_path, "demo")[0]]
    for folder in folders:
        assert sorted(pools(Engine(folder)), key=len) == [[ONE], [ONE, TWO, THREE]], "each once"
    new = Engine(folders[2]).policies
    assert new.costs.known, "where it has nothing of its own: what another has learned"
    lock.release()


def test_a_folder_that_nobody_claims_is_read_all_the_same(tmp_path: Path) -> None:
    """As after a start with fewer replicas."""
    written(tmp_path / "replica-5", (ONE, "me"))
    assert pools(Engine(claim(tmp_path, "demo")[0])) == [[ONE]]


def test_policies_keep_what_they_learned_themselves(tmp_path: Path) -> None:
    written(tmp_path / "replica-0", (ONE, "me"), learns=True)
    written(tmp_path / "replica-1", (ONE, "me"))
    policies = {name: text for name, text in contents(tmp_path / "replica-0").items() if "policies" in name}
    merge(tmp_path / "replica-0", [tmp_path / "replica-1"])
    assert policies.items() <= contents(tmp_path / "replica-0").items()


def test_merging_twice_adds_nothing(tmp_path: Path) -> None:
    written(tmp_path / "replica-0", (ONE, "me"))
    written(tmp_path / "replica-1", (TWO, "me"))
    a, b = tmp_path / "replica-0", tmp_path / "replica-1"
    merge(a, [b])
    merge(b, [a])
    before = contents(a)
    merge(a, [b])
    assert pools(Engine(a)) == pools(Engine(b)) == [[ONE, TWO]] and contents(a).keys() == before.keys()


def test_a_broken_file_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "replica-0", (ONE, "me"))
    written(tmp_path / "replica-1", (TWO, "me"))
    written(tmp_path / "replica-2", (THREE, "me"))
    (broken,) = (tmp_path / "replica-1").glob("pools-*")
    broken.write_text(broken.read_text()[:-20])
    own, lock = claim(tmp_path, "demo")
    assert pools(Engine(own)) == [[ONE, THREE]] and str(broken) in caplog.text
    other, _ = claim(tmp_path, "demo")
    before = broken.read_text()
    assert other.name == "replica-1" and broken.read_text() == before, "it is not written over"
    lock.release()


def test_a_deleted_pool_does_not_come_back_from_a_folder_without_a_replica(tmp_path: Path) -> None:
    written(tmp_path / "replica-0", (ONE, "me"), (TWO, "you"))
    written(tmp_path / "replica-1", (ONE, "me"), (TWO, "you"))
    own, lock = claim(tmp_path, "demo")
    engine = Engine(own)
    assert engine.proposers.forget("", "me") == 1
    engine.state.save()
    assert forget(tmp_path, "", "me") == 1 and forget(tmp_path, "", "me") == 0
    other, second = claim(tmp_path, "demo")
    assert pools(Engine(other)) == [[TWO]]
    assert forget(tmp_path, "", None) == 0, "both folders have a replica now"
    lock.release()
    second.release()


def test_a_planted_deletion_in_one_folder_is_found(tmp_path: Path) -> None:
    written(tmp_path / "replica-0", (ONE, "me"))
    written(tmp_path / "replica-1", (ONE, "me"))
    own, _ = claim(tmp_path, "demo")
    engine = Engine(own)
    assert engine.proposers.forget("", "me") == 1
    engine.state.save()
    assert pools(Engine(claim(tmp_path, "demo")[0])) == [[ONE]], "it came back"


def test_an_engine_that_still_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "LOCK_SECONDS", 0.1)
    (tmp_path / "replica-0").mkdir()
    with hold(tmp_path / "replica-0", "demo"), pytest.raises(StateInUse, match="replica-0"):
        claim(tmp_path, "demo")
    assert claim(tmp_path, "demo")[0].name == "replica-0"


def test_a_folder_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="/proc/speculon"):
        claim(Path("/proc/speculon"), "demo")


def test_a_planted_merge_that_loses_answers_is_found(tmp_path: Path) -> None:
    """What the tests above would see if the later file replaced the earlier one."""
    assert joined([*ONE, -1, *TWO, -1], [*THREE, -1]) != [*THREE, -1]
    assert joined([*ONE, -1, *TWO, -1], [*TWO, -1]) == [*ONE, -1, *TWO, -1]
    assert joined([], [*ONE]) == [*ONE] == joined([*ONE], [*ONE])
