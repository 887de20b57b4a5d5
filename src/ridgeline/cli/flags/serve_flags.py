"""Read the command line of `ridgeline serve` as vLLM does: its flags, config files and lists of values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ridgeline.cli.flags.vllm_flags import KNOWN, Flag
from ridgeline.errors import RequestError

CONFIG = "--config"
MODEL = ("--model", "-m")


class ServeCommand(TyperCommand):
    """A command that also takes vLLM's flags, which its help does not list: each is removed or replaced."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments after `serve`; click calls this."""
        from ridgeline.cli.show.report import say

        options = {
            name: Option(name, not getattr(p, "is_flag", False) and not getattr(p, "count", False),
                         bool(getattr(p, "multiple", False)))
            for p in self.get_params(ctx)
            for name in (*p.opts, *p.secondary_opts)
            if name.startswith("-")
        }  # fmt: skip
        line = Line(options)
        args = list(line.rewrite(line.with_config(args)))
        say(*(f"note: {note}" for note in dict.fromkeys(line.notes)))
        return super().parse_args(ctx, args)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command. takes_value: a value follows it. repeats: it may be given several times."""

    name: str
    takes_value: bool
    repeats: bool


@dataclass(slots=True)
class Line:
    """Rewrites a command line. options: the command's options, by each of their names. notes: messages for the user."""

    options: Mapping[str, Option]
    notes: list[str] = field(default_factory=list)

    def with_config(self, args: Sequence[str]) -> list[str]:
        """Return the arguments after those of the config file; an argument overrides the file.

        Raises RequestError for a file that cannot be read, and for an unknown option in it.
        """
        files, rest, given = [], [], set[str]()
        items = _Items(args)
        for arg in items:
            name, value = self._split(arg)
            if name == CONFIG:
                files.append(items.value_of(name, value))
                continue
            rest.append(arg)
            if name is None:
                given.add(MODEL[0])
                continue
            given.add(MODEL[0] if name in MODEL else name)
            if value is None and self._takes_value(name) and items:
                rest.append(next(items))
        if len(files) > 1:
            raise RequestError(f"{CONFIG} is given {len(files)} times; give one file")
        found = [arg for file in files for arg in self._from_file(file, given)]
        return found + rest

    def rewrite(self, args: Sequence[str]) -> Iterator[str]:
        """Return the arguments as options of the command. Raises RequestError for a flag that cannot be honored."""
        items, has_model = _Items(args), False
        for arg in items:
            name, value = self._split(arg)
            if name is None:
                has_model = True
                yield arg
            elif (flag := KNOWN.get(name)) is not None and name not in self.options:
                yield from self._vllm(name, flag, items.value_of(name, value) if flag.takes_value else value)
            elif (option := self.options.get(name)) is None or not option.takes_value:
                yield arg if value is None else f"{name}={value}"
            else:
                has_model = has_model or name in MODEL
                values = [items.value_of(name, value)]
                if option.repeats:
                    values = _listed(values[0])
                    # vLLM's lists have no end mark: they are read after the model only, which would look like a value.
                    while has_model and value is None and items and not items.peek().startswith("-"):
                        values.append(next(items))
                for each in values:
                    yield from (name, each)

    def _split(self, arg: str) -> tuple[str | None, str | None]:
        """Return an option's name, with dashes, and the value after its equals sign; else (None, None)."""
        if not arg.startswith("-") or arg in ("-", "--"):
            return None, None
        name, sign, value = arg.partition("=")
        dashed = name.replace("_", "-")
        return (dashed if dashed in self.options or dashed in KNOWN else name), value if sign else None

    def _takes_value(self, name: str) -> bool:
        if name in self.options:
            return self.options[name].takes_value
        return name in KNOWN and KNOWN[name].takes_value

    def _vllm(self, name: str, flag: Flag, value: str | None) -> Sequence[str]:
        """Return the arguments that replace a flag of vLLM's."""
        shown = f"{name} {value}" if flag.takes_value else name
        if not flag.takes_value and value is not None and flag.says and not _is_accepted(flag, value):
            raise RequestError(f"{name}={value}: the flag takes no value; leave the flag out to disable it")
        if not flag.says or not _is_accepted(flag, value):
            raise RequestError(f"{shown}: {flag.refuses}")
        translated = flag.translate(value or "") if flag.translate else ()
        self.notes.append(f"{shown}: {flag.says}")
        if translated:
            return translated
        return (*flag.becomes, str(int(float(value or 0) * flag.scale))) if flag.scale else flag.becomes

    def _from_file(self, file: str, given: set[str]) -> Iterator[str]:
        """Yield the options of a config file that are not given as arguments."""
        for key, value in read_options(file, CONFIG).items():
            name = f"--{key.lstrip('-').replace('_', '-')}"
            off = f"--no-{name[2:]}"
            if name == CONFIG or not {name, off} & (self.options.keys() | KNOWN.keys()):
                import difflib

                near = difflib.get_close_matches(name, [*self.options, *KNOWN], n=3, cutoff=0.0)
                raise RequestError(
                    f"{CONFIG} {file}: {key} is not an option of `ridgeline serve`; did you mean {' or '.join(near)}?"
                )
            if name in given or off in given:
                continue
            if isinstance(value, bool):
                yield from (name,) if value else (off,) if off in self.options or off in KNOWN else ()
            elif value is None or value == []:
                raise RequestError(f"{CONFIG} {file}: {key} has no value; add a value or remove the line")
            else:
                for each in value if isinstance(value, list) else [value]:
                    yield f"{name}={json.dumps(each) if isinstance(each, dict | list) else each}"


@dataclass(slots=True)
class _Items:
    """An iterator over arguments that can look ahead."""

    args: Sequence[str]
    at: int = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if not self:
            raise StopIteration
        self.at += 1
        return self.args[self.at - 1]

    def __bool__(self) -> bool:
        return self.at < len(self.args)

    def peek(self) -> str:
        """Return the next argument without taking it."""
        return self.args[self.at]

    def value_of(self, name: str, value: str | None) -> str:
        """Return an option's value: after its equals sign, or the next argument. Raises RequestError without one."""
        if value is None and not self:
            raise RequestError(f"{name} needs a value; write {name}=VALUE")
        return next(self) if value is None else value


def _is_accepted(flag: Flag, value: str | None) -> bool:
    if not flag.takes_value:
        return value is None or value.lower() == "true"
    if flag.between is not None:
        try:
            return flag.between[0] <= float(value or "") <= flag.between[1]
        except ValueError:
            return False
    return flag.accepts is None or value in flag.accepts


def _listed(value: str) -> list[str]:
    """Return the texts of a JSON list, as vLLM's --allowed-origins takes one; else the value itself."""
    try:
        found = json.loads(value) if value.startswith("[") else None
    except ValueError:
        found = None
    return found if isinstance(found, list) and found and all(isinstance(x, str) for x in found) else [value]


def read_options(file: str, option: str) -> Mapping[str, Any]:
    """Read a YAML, TOML or JSON file that an option names. Raises RequestError."""
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]

            found = yaml.safe_load(text)
        elif path.suffix == ".toml":
            import tomllib

            found = tomllib.loads(text)
        elif path.suffix == ".json":
            found = json.loads(text)
        else:
            raise RequestError(f"{option} {file}: the name must end in .yaml, .yml, .toml or .json")
    except OSError as e:
        raise RequestError(f"{option} {file}: {e.strerror}") from None
    except RequestError:
        raise
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{option} {file}: {e}") from None
    except Exception as e:  # yaml's own errors; their base class is known only after the import
        raise RequestError(f"{option} {file} is not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise RequestError(f"{option} {file} must contain options with values, such as `port: 8080`")
    return found
