"""What documents show: their code blocks, commands and Python calls, and what the code knows of them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from typer.main import get_command

from speculon.cli import app
from speculon.core.config import (
    EngineConfig,
    RequestSpeculation,
    SamplingParams,
    ServeConfig,
    SpeculationConfig,
)
from speculon.core.errors import ConfigError
from speculon.operations.cluster.config import read

ROOT = Path(__file__).resolve().parents[1]
# What a reader follows today; recorded runs keep the command of their commit.
GUIDES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/decisions/*.md"),
        *ROOT.glob("recipes/*/*.md"),
    ]
)
SETTINGS: tuple[type[BaseModel], ...] = (SamplingParams, SpeculationConfig, ServeConfig, EngineConfig)
SHELL = {"printf", "cat", "grep", "pip", "curl", "make", "python", "export", "cd", "vllm"}
SEPARATORS = {"|", "||", "&&", ";", "&"}
PREFIXES = ("/v1", "/admin/api")  # of routers, whose routes are written without them
NO_COMMAND = {"speculon --compile", "speculon off"}  # modes of an engine, as tables name them


def blocks(document: Path, *languages: str) -> list[str]:
    """The code blocks of a document in one of the languages; the language of a plain block is empty."""
    text = document.read_text(encoding="utf-8")
    found = re.findall(r"^```([a-z]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def commands(document: Path) -> list[str]:
    """Each command of the shell blocks, of plain blocks behind a `$`, and of inline code."""
    shown = [line for body in blocks(document, "bash", "sh") for line in logical_lines(body)]
    for body in blocks(document, "", "console", "text"):
        shown += [line[2:] for line in logical_lines(body) if line.startswith("$ ")]
    prose = re.sub(
        r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    inline = [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose)]
    shown += [
        code
        for code in inline
        if re.match(r"(speculon|make|python -m) [a-z-]", code) and code not in NO_COMMAND
    ]
    return shown


def logical_lines(body: str) -> Iterator[str]:
    """Lines of a shell block; a quoted string or a backslash goes over several."""
    pending = ""
    for line in body.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if not pending.endswith("\\") and balanced(pending):
            if pending.strip():
                yield pending.replace("\\\n", " ")
            pending = ""


def balanced(text: str) -> bool:
    try:
        words(text)
    except ValueError:
        return False
    return True


def words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def calls_in(command: str) -> Iterator[list[str]]:
    """The programs that a command line runs, each with its arguments; redirections are left out."""
    call: list[str] = []
    skip = False
    for word in [*words(command), ";"]:
        if skip or re.fullmatch(r"\d?[<>]+&?", word):
            call = call[:-1] if not skip and call and call[-1].isdigit() else call
            skip = not skip
        elif word in SEPARATORS:
            if call:
                yield call
            call = []
        elif call or not re.match(r"[A-Z_]+=", word):
            call.append(word)


def fault_of(call: list[str]) -> str | None:
    """What is wrong with a call, by the code of this checkout; nothing is run."""
    program, *arguments = call
    if program == "speculon":
        return fault_of_speculon(arguments)
    if program == "make":
        return fault_of_make(arguments)
    if program == "curl":
        return fault_of_curl(arguments)
    if program == "serve":
        return fault_of_serve(arguments)
    if program.startswith("python"):
        return fault_of_python(arguments)
    if program == "bash" and arguments:
        return None if (ROOT / arguments[0]).is_file() else f"{arguments[0]}: no such script"
    return None if program in SHELL or program == "" else f"{program}: no program that documents show"


@cache
def command_line() -> Any:
    """`speculon`, with all its commands."""
    return get_command(app)


def fault_of_speculon(arguments: list[str]) -> str | None:
    group = command_line()
    name = "speculon"
    try:
        while hasattr(group, "commands"):
            if not arguments or {"--help", "--version", "--help-all"} & set(arguments):
                return None
            flags = [word for word in arguments if word in ("-v", "--verbose")]
            arguments = arguments[len(flags) :] if arguments[: len(flags)] == flags else arguments
            name, arguments = arguments[0], arguments[1:]
            group = group.commands[name]
        context = group.make_context(name, list(arguments), resilient_parsing=False)
    except KeyError:
        return f"speculon {name}: no such command"
    except Exception as error:  # click's errors, whatever package they come from
        return f"speculon {name}: {getattr(error, 'message', error)}"
    takes_settings = "acceptance" in context.params
    return fault_of_values(context.params) if takes_settings else None


def variables() -> set[str]:
    """Every variable of the environment that is a setting."""
    tables = {"": EngineConfig, "SPECULATION__": SpeculationConfig, "SERVE__": ServeConfig}
    return {"SPECULON_CONFIG", "SPECULON_MODELS", "SPECULON_CACHE"} | {
        f"SPECULON_{table}{name.upper()}" for table, model in tables.items() for name in model.model_fields
    }


@cache
def flags() -> set[str]:
    """Every flag of every command."""
    found, open_groups = set(), [command_line()]
    while open_groups:
        group = open_groups.pop()
        for parameter in group.params:
            found.update([*parameter.opts, *parameter.secondary_opts])
        open_groups += getattr(group, "commands", {}).values()
    return found | {"--help"}


def flags_shown(document: Path) -> list[str]:
    """The flags that inline code names, `--flag` or `--flag VALUE`."""
    return re.findall(r"`(--[a-z][a-z-]*)[^`]*`", document.read_text(encoding="utf-8"))


def fault_of_values(given: dict[str, Any]) -> str | None:
    """The first value that its setting refuses; a placeholder such as MODEL or FILE is no value."""
    for settings in SETTINGS:
        for name, field in settings.model_fields.items():
            value = given.get(name)
            if (
                not isinstance(value, str)
                or value.isupper()
                or value.startswith("{")
                or "Path" in str(field.annotation)
            ):
                continue
            try:
                TypeAdapter(field.annotation, config=None).validate_python(value)
                if name == "policy":
                    SpeculationConfig(policy=value)
            except Exception as error:
                return f"--{name.replace('_', '-')} {value}: {str(error).splitlines()[-1]}"
    return None


def fault_of_serve(arguments: list[str]) -> str | None:
    """Ray Serve's command: what it runs, and the settings that follow."""
    verb, *rest = arguments
    if verb != "run":
        return None if verb in ("deploy", "status") else f"serve {verb}: no such command here"
    if rest[0] != "speculon.operations.cluster:app":
        return f"{rest[0]}: no application of ours"
    try:
        read(dict(setting.split("=", 1) for setting in rest[1:]))
    except ConfigError as error:
        return str(error)
    return None


def fault_of_make(arguments: list[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    missing = [word for word in arguments if "=" not in word and word not in targets]
    return f"make: no target {missing[0]}" if missing else None


def fault_of_curl(arguments: list[str]) -> str | None:
    rooms = [ROOT / "src/speculon" / room for room in ("server", "operations")]
    server = "\n".join(path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py"))
    routes = [re.sub(r"\{[^}]*\}", "[^/]+", path) for path in re.findall(r'"(/[^"\s]*)"', server)]
    for word in arguments:
        if address := re.match(r"(?:https?://)?(?:localhost|127\.0\.0\.1):\d+(/[^?]*)", word):
            known = [address[1], *(address[1].removeprefix(prefix) for prefix in PREFIXES)]
            if not any(re.fullmatch(route, path) for route in routes for path in known):
                return f"curl: the server has no route {address[1]}"
        if word.startswith("{"):
            json.loads(word)
    return None


def fault_of_python(arguments: list[str]) -> str | None:
    """A module or file of this checkout that exists and mentions each flag."""
    if not arguments or arguments[0] == "-c":
        return None
    if arguments[0] == "-m":
        if not arguments[1].startswith("recipes."):
            return None
        path, flags = ROOT / f"{arguments[1].replace('.', '/')}.py", arguments[2:]
    else:
        path, flags = ROOT / arguments[0], arguments[1:]
    if not path.is_file():
        return f"python: no file {path.relative_to(ROOT)}"
    source = path.read_text(encoding="utf-8")
    unknown = [word for word in flags if word.startswith("--") and not mentions(source, word.split("=")[0])]
    return f"python {path.name}: no flag {unknown[0]}" if unknown else None


def mentions(source: str, flag: str) -> bool:
    return f'"{flag}"' in source or f'"{flag[2:].replace("-", "_")}"' in source


# Python


def faults_in_python(source: str) -> list[str]:
    """Imports that do not exist, and keywords that nothing takes."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "speculon":
            found += [
                f"{node.module}.{a.name}" for a in node.names if not has_name(node.module or "", a.name)
            ]
        if isinstance(node, ast.Call):
            found += [f"{called(node)}({keyword})" for keyword in unknown_keywords(node)]
    return found


def has_name(module: str, name: str) -> bool:
    """Whether a module has the name, by its source: importing some of them takes seconds."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return False
    if (path / f"{name}.py").is_file():
        return True
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return name in {bound for node in tree.body for bound in bound_by(node)}


def bound_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if names == ["__all__"] and isinstance(
        node, ast.Assign
    ):  # names that are imported when they are first used
        names += ast.literal_eval(node.value)
    return names


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def unknown_keywords(node: ast.Call) -> list[str]:
    known = known_keywords(called(node))
    given = [keyword for keyword in node.keywords if keyword.arg]
    unknown = [str(keyword.arg) for keyword in given if known is not None and keyword.arg not in known]
    inner = SpeculationConfig.model_fields.keys() | RequestSpeculation.model_fields.keys()
    for keyword in given:
        if keyword.arg == "speculation" and isinstance(keyword.value, ast.Dict):
            names = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
            unknown += [str(name) for name in names if name not in inner]
    return unknown


def known_keywords(name: str) -> set[str] | None:
    """The keywords of a class or method of the public interface; None for anything else."""
    models: tuple[type[BaseModel], ...] = (*SETTINGS, RequestSpeculation)
    for model in models:
        if model.__name__ == name:
            return set(model.model_fields)
    interface = INTERFACE.get(name)
    if interface is None or name not in ENGINES:
        return interface
    return interface | set(EngineConfig.model_fields) | set(SpeculationConfig.model_fields)


def interface_of(*files: str) -> dict[str, set[str]]:
    """Of each class and public method in the files: the keywords that it takes."""
    found: dict[str, set[str]] = {}
    for file in files:
        tree = ast.parse((ROOT / "src/speculon" / file).read_text(encoding="utf-8"))
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
                name = cls.name if method.name == "__init__" else method.name
                if not name.startswith("_"):
                    parameters = method.args.args + method.args.kwonlyargs
                    found.setdefault(name, set()).update(parameter.arg for parameter in parameters)
    return found


ENGINES = ("LLM", "SpeculativeDecoder")  # which take the engine's settings as keywords
INTERFACE = interface_of("engine/llm.py", "engine/decoder.py")
