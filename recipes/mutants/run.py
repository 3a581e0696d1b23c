"""Plants each error of mutants.toml in a copy of the checkout, and says which test turns red, and how fast.

    python -m recipes.mutants.run --json build/mutants.json
    python -m recipes.mutants.run --only 'prefix-*' top-p-off-by-one --suite hints
    python -m recipes.mutants.run --tests tests/pure    # what does this suite see?

The tests that a mutant names run first, up to the first that fails. Where none fails, all of `make test`
follow, and with `--suite soak` the long tests. A mutant that no test sees has survived, which is a finding.
A test that is red without the mutant, too, says nothing about it, so the command ends there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TypeVar

from recipes.mutants.checkout import LIBRARIES, LONG, QUICK, Checkout, Run, TestsFailed
from recipes.mutants.planted import Mutant, read_mutants
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from speculon.measure.bench.provenance import commit, machine, versions
from speculon.runtimes.llama.library import installed

ROOT = Path(__file__).resolve().parents[2]
SUITES = ["tests/pure", "tests/differential", "tests/server", "tests/tiny", "tests/stat"]  # of `make test`
SOAK, LLAMA = "tests/soak", "tests/llama"

Item, Result = TypeVar("Item"), TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one mutant."""

    name: str
    what: str
    file: str
    suite: str | None  # whose test turned red; None: the mutant has survived
    test: str | None
    seconds: float  # until then, or of all that ran
    hung: bool
    missing: list[str]  # named tests that are not there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="mutants; * is allowed")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of those that mutants name")
    parser.add_argument(
        "--suite", choices=("hints", "test", "soak"), default="test", help="how far a survivor is followed"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, each in a copy of its own")
    parser.add_argument("--json", type=Path, help="file for the findings")
    arguments = parser.parse_args()
    mutants = chosen(read_mutants(), arguments.only)
    if arguments.tests:
        mutants = [with_tests(mutant, arguments.tests) for mutant in mutants]
    console = Console()
    mutants = with_packages(mutants, console)
    try:
        findings = run_all(mutants, arguments.suite, arguments.jobs, console)
    except TestsFailed as error:
        sys.exit(str(error))
    console.print(table(findings))
    if arguments.json:
        write_report(arguments.json, findings)


def chosen(mutants: list[Mutant], patterns: list[str]) -> list[Mutant]:
    for pattern in patterns:
        if not any(fnmatch(mutant.name, pattern) for mutant in mutants):
            sys.exit(f"--only {pattern}: no mutant has this name")
    return [mutant for mutant in mutants if any(fnmatch(mutant.name, pattern) for pattern in patterns)]


def with_tests(mutant: Mutant, tests: list[str]) -> Mutant:
    return Mutant(mutant.name, mutant.what, mutant.old, mutant.new, tuple(tests))


def with_packages(mutants: list[Mutant], console: Console) -> list[Mutant]:
    """Those whose tests can run here."""
    if installed():
        return mutants
    here = [mutant for mutant in mutants if not any(test.startswith(LLAMA) for test in mutant.tests)]
    if left_out := len(mutants) - len(here):
        why = "llama-cpp-python is not in PYTHONPATH; `make llama` puts it into .venv/llama"
        console.print(f"{left_out} mutants of runtime llama are left out: {why}")
    return here


def run_all(
    mutants: list[Mutant],
    suite: str,
    jobs: int,
    console: Console,
    root: Path = ROOT,
    libraries: Sequence[str] = LIBRARIES,
) -> list[Finding]:
    """Findings in the order of the mutants. Raises `TestsFailed` where tests are red without any of them."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="speculon-mutants-"))
        bars = stack.enter_context(Progress(*columns, console=console))
        copies = [Checkout(root, Path(folder) / str(number), libraries) for number in range(jobs)]
        for copy in copies:
            stack.callback(copy.close)
        for mutant in mutants:
            mutant.place(copies[0].sources)  # a stale one ends the command before hours of tests
        if not copies[0].imports_itself():
            raise TestsFailed("tests would import another speculon than that of the copy")
        found = {}
        task = bars.add_task("mutants", total=len(mutants))
        for finding in in_turns(partial(judge, suite=suite), mutants, copies, task, bars):
            found[finding.name] = finding
            bars.console.print(line(finding), highlight=False)
    return [found[mutant.name] for mutant in mutants]


def in_turns(
    work: Callable[[Item, Checkout], Result],
    items: list[Item],
    copies: list[Checkout],
    task: TaskID,
    bars: Progress,
) -> Iterator[Result]:
    """What `work` makes of the items, as they are done, one at a time in each copy."""
    free: SimpleQueue[Checkout] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def in_a_copy(item: Item) -> Result:
        copy = free.get()
        try:
            return work(item, copy)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            for done in as_completed([pool.submit(in_a_copy, item) for item in items]):
                yield done.result()
                bars.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise


def by_marks(tests: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Tests of seconds, then long ones."""
    for marks, some in (
        (QUICK, [test for test in tests if not test.startswith(SOAK)]),
        (LONG, [test for test in tests if test.startswith(SOAK)]),
    ):
        if some:
            yield marks, some


def judge(mutant: Mutant, copy: Checkout, suite: str) -> Finding:
    """Runs the mutant's own tests, then as many of the others as `suite` says, up to the first red one."""
    named = copy.existing(mutant.tests)
    stages = [*by_marks(named)]
    if suite != "hints":
        stages.append((QUICK, copy.existing(tuple(SUITES))))
    if suite == "soak":
        stages.append((LONG, [SOAK, *copy.existing(tuple(SUITES))]))
    seconds, run, marks = 0.0, Run(0.0), QUICK
    with copy.planted(mutant) as place:
        for marks, tests in stages:
            run = copy.test(tests, marks)
            seconds += run.seconds
            if run.red:
                break
    if run.red and copy.test([*run.red], marks).red:
        raise TestsFailed(f"{mutant.name}: {' '.join(run.red)} is red without it, too, so it says nothing")
    missing = [test for test in mutant.tests if test not in named]
    suite_name = None
    if run.red:
        suite_name = "soak" if marks == LONG else run.red[0].split("/")[1]
    return Finding(
        mutant.name,
        mutant.what,
        str(place),
        suite_name,
        " ".join(run.red) or None,
        round(seconds, 1),
        run.hung,
        missing,
    )


def line(finding: Finding) -> str:
    if finding.test is None:
        verdict = "[bold red]survived[/]"
    else:
        verdict = f"[green]red[/] {'(hangs) ' * finding.hung}by {escape(finding.test)}"
    missing = f"; missing: {', '.join(finding.missing)}" if finding.missing else ""
    return f"{finding.name}: {verdict}, {finding.seconds:.0f} s{missing}"


def escape(text: str) -> str:
    return text.replace("[", r"\[")


def table(findings: list[Finding]) -> Table:
    survived = sum(finding.test is None for finding in findings)
    title = f"{len(findings) - survived} of {len(findings)} mutants are red, {survived} survived"
    made = Table("mutant", "suite", "test", "s", title=title)
    for finding in findings:
        test = escape(finding.test) if finding.test else "[bold red]survived[/]"
        made.add_row(finding.name, finding.suite or "", test, f"{finding.seconds:.0f}")
    return made


def write_report(path: Path, findings: list[Finding]) -> None:
    report = {
        "command": " ".join(["python -m recipes.mutants.run", *sys.argv[1:]]),
        "date": str(date.today()),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "red": sum(finding.test is not None for finding in findings),
        "survived": [finding.name for finding in findings if finding.test is None],
        "mutants": [asdict(finding) for finding in findings],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
