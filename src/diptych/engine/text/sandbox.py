"""The jinja2 sandbox of chat templates: Hugging Face's extensions, bounded time and size, marks of where text comes from.

A template is a file from a stranger. It can read what it is given and nothing else, and it cannot run long or grow
large: every loop turn, call, filter and printed value is counted. The same hooks note which message, tool or document
each printed piece belongs to (`RenderedPiece`); `template.py` makes segments of them.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.ground.clock import Clock, MonotonicClock, wall_time_s
from diptych.ground.errors import TemplateError

MAX_TEMPLATE_BYTES = 1 << 20
MAX_RENDER_S = 10.0
MAX_TURNS = 300_000  # loop turns, calls, and filters by how much they read; about 5 us each
MAX_CHARS = 16 << 20  # printed by one rendering, and size of any one value on the way
MAX_PLAIN_CHARS = 256 << 20  # plain template text of all loop turns and macro calls
MAX_NUMBER = 1_000_000  # as an argument of a filter or text method: widths, counts, indents

_FILTERS_BY_SIZE = ("center", "indent", "wordwrap", "batch", "slice", "truncate", "replace", "join", "format")
_CONSTANT_FILTERS = ("length", "count", "first", "last", "default", "d")  # whatever the length of what they filter
_SIZED = (str, bytes, list, tuple)
_LONG_WIDTH = re.compile(r"\d{6,}|\*|\{[^}]*\{")


@dataclass(slots=True)
class _Run:
    """The counters and the current source of one rendering."""

    clock: Clock
    deadline_s: float
    turns: int = 0
    chars: int = 0
    plain_chars: int = 0
    marks: list[tuple[int, object]] = field(default_factory=list)  # (nesting level, source), innermost last

    def turn(self, n: int = 1) -> None:
        self.turns += n
        if self.turns > MAX_TURNS:
            raise TemplateError(f"chat template ran for more than {MAX_TURNS} turns of its loops and calls")
        if self.clock.now_s() > self.deadline_s:
            raise TemplateError(f"chat template ran for more than {MAX_RENDER_S:g} s")

    def printed(self, n_chars: int) -> None:
        self.chars += n_chars
        check_size(self.chars)

    def plain_text(self, n_chars: int) -> None:
        self.plain_chars += n_chars
        if self.plain_chars > MAX_PLAIN_CHARS:
            raise TemplateError("chat template prints too much text in its loops")


@dataclass(frozen=True, slots=True)
class RenderedPiece:
    """A piece of output and the source it was printed for (a `Marked` value's mark, a section name, or None)."""

    text: str
    source: object


class GivenList(list):
    """A list that templates may not change."""

    __slots__ = ()


class Marked(dict):
    """A dict that templates see as a dict, and the sandbox as message / tool / document number so-and-so."""

    __slots__ = ("_source",)

    def __init__(self, values: Mapping[str, Any], source: object) -> None:
        super().__init__(values)
        self._source = source


def _given(value: Any) -> Any:
    return GivenList(value) if type(value) is list else value


def check_size(n_chars: int) -> None:
    """Raise TemplateError when a value or the output is larger than MAX_CHARS."""
    if n_chars > MAX_CHARS:
        raise TemplateError(f"chat template makes {n_chars} characters; at most {MAX_CHARS} are accepted")


def value_size(value: Any) -> int:
    """How many characters `value` has when printed, roughly; raises TemplateError beyond MAX_CHARS.

    A list may hold one large text many times, so a value can be far larger than the memory it takes.
    """
    size = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            size += 8 * len(one)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            size += 8 * len(one)
            waiting += one
        elif isinstance(one, int):
            size += one.bit_length() // 3
        check_size(size)
    return size


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Safe to use from several threads: a rendering's state is per thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._local = threading.local()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
            cache_size=0,
        )
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(name, function)

    def pieces(self, template: jinja2.Template, variables: Mapping[str, Any]) -> list[RenderedPiece]:
        """Render; the concatenated texts are the output. Raises TemplateError for anything a template can do wrong."""
        run = _Run(clock=self._clock, deadline_s=self._clock.now_s() + MAX_RENDER_S)
        self._local.run = run
        pieces: list[RenderedPiece] = []
        try:
            for text in template.generate(**{name: _given(value) for name, value in variables.items()}):
                run.turn()
                pieces.append(RenderedPiece(text, run.marks[-1][1] if run.marks else None))
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateError("chat template calls itself too deeply") from None
        except MemoryError:
            raise TemplateError("chat template needs too much memory") from None
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error.message or type(error).__name__}") from error
        except Exception as error:  # a template's TypeError, KeyError, ... is the template's fault
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error
        finally:
            del self._local.run
        return pieces

    def compile_source(self, source: str) -> jinja2.Template:
        """Compile. Raises TemplateError with the line of a syntax error."""
        if len(source) > MAX_TEMPLATE_BYTES:
            raise TemplateError(f"chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES}")
        try:
            return self.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError, OverflowError, ValueError) as error:
            raise TemplateError(f"chat template cannot be compiled: {type(error).__name__}") from error

    # ---- hooks of jinja2

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _instrument(tree.body, level=0, marks_sources=True)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """A list that the template itself made may grow (Kimi collects ids in one); what it was given stays as it is."""
        is_own_list = type(obj) is list and attr == "append"
        return is_own_list or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call from a template passes here."""
        self._turn()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_text_call(owner, function.__name__, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format` reaches templates only through this wrapper."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None
        form = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(form, [*args, *kwargs.values()])
            return safe(*args, **kwargs)

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic that can make something large is checked before it is done."""
        self._turn()
        if operator == "*":
            check_size(_repeat_size(left, right))
        elif operator == "**" and (abs(_number(left)) > 1e6 or abs(_number(right)) > 64):
            raise TemplateError("chat template raises a number to a power that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            check_size((len(left) + len(right)) * (1 if isinstance(left, str) else 8))
        return super().call_binop(context, operator, left, right)

    def _turn(self, n: int = 1) -> None:
        run: _Run | None = getattr(self._local, "run", None)
        if run is not None:
            run.turn(n)

    def _finalize(self, value: Any) -> Any:
        """Every printed value passes here, also those that go into a macro's or block's buffer."""
        run: _Run | None = getattr(self._local, "run", None)
        if run is not None:
            run.turn()
            run.printed(value_size(value))
        return value

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, counted, and refusing numbers and products that make its result very large."""

        def bounded(*args: Any, **kwargs: Any) -> Any:
            is_read = name not in _CONSTANT_FILTERS
            if any(hasattr(value, "__next__") for value in args):
                # a generator can be read once: read it here, and pass on what was read
                args, is_read = tuple(list(value) if hasattr(value, "__next__") else value for value in args), True
            self._turn(1 + is_read * sum(len(value) for value in args if isinstance(value, list | tuple | range)))
            if name in _FILTERS_BY_SIZE:
                values = [*args, *kwargs.values()]
                _check_text_call(next((value for value in values if isinstance(value, str)), ""), name, values)
            return function(*args, **kwargs)

        if hasattr(function, "jinja_pass_arg"):
            bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return bounded

    # ---- called by the instrumented template

    def loop_turn(self, level: int, item: Any, n_chars: int) -> None:
        """A loop turn begins; n_chars of plain template text may be printed in it."""
        run: _Run = self._local.run
        run.turn()
        run.plain_text(n_chars)
        if level >= 0:
            items: Iterable[Any] = item if isinstance(item, tuple) else (item,)
            source = next((one._source for one in items if isinstance(one, Marked)), None)
            _leave(run.marks, level)
            if source is not None:
                run.marks.append((level, source))

    def macro_turn(self, n_chars: int) -> None:
        """A macro or call block begins."""
        run: _Run = self._local.run
        run.turn()
        run.plain_text(n_chars)

    def enter(self, level: int, source: str) -> None:
        """A block that is printed only for `source` begins."""
        marks = self._local.run.marks
        _leave(marks, level)
        marks.append((level, source))

    def leave(self, level: int) -> None:
        """The loop or block at `level` has ended."""
        _leave(self._local.run.marks, level)

    def concat_checked(self, *values: Any) -> str:
        """The `~` operator."""
        self._turn()
        check_size(sum(map(value_size, values)))
        return "".join(map(str, values))


def _leave(marks: list[tuple[int, object]], level: int) -> None:
    while marks and marks[-1][0] >= level:
        marks.pop()


# ---- instrumentation of the syntax tree


def _instrument(body: list[nodes.Node], *, level: int, marks_sources: bool) -> None:
    """Insert the calls that count turns and mark sources, in place.

    Inside macros and call blocks (`marks_sources` False) output is buffered and appears where the macro is called, so
    only turns are counted there.
    """
    i = 0
    while i < len(body):
        node = body[i]
        _replace_concat(node)
        if isinstance(node, nodes.For):
            inner = level if marks_sources else -1
            _instrument(node.body, level=level + 1, marks_sources=marks_sources)
            _instrument(node.else_, level=level + 1, marks_sources=marks_sources)
            node.body.insert(0, _statement("loop_turn", nodes.Const(inner), _loaded(node.target), _text_size(node)))
            if marks_sources:
                body.insert(i + 1, _statement("leave", nodes.Const(level)))
        elif isinstance(node, nodes.If):
            _instrument_if(node, level=level, marks_sources=marks_sources)
            if marks_sources:
                body.insert(i + 1, _statement("leave", nodes.Const(level)))
        elif isinstance(node, nodes.Macro | nodes.CallBlock | nodes.AssignBlock | nodes.FilterBlock):
            _instrument(node.body, level=level + 1, marks_sources=False)
            node.body.insert(0, _statement("macro_turn", _text_size(node)))
        elif isinstance(getattr(node, "body", None), list):
            _instrument(node.body, level=level + 1, marks_sources=marks_sources)  # type: ignore[attr-defined]
            if marks_sources:
                body.insert(i + 1, _statement("leave", nodes.Const(level)))
        i += 1 + (i + 1 < len(body) and _is_ours(body[i + 1]))


def _instrument_if(node: nodes.If, *, level: int, marks_sources: bool) -> None:
    for branch in (node, *node.elif_):
        _instrument(branch.body, level=level + 1, marks_sources=marks_sources)
        sections = _sections_of(branch.test)
        if marks_sources and len(sections) == 1:
            branch.body.insert(0, _statement("enter", nodes.Const(level), nodes.Const(sections.pop())))
    _instrument(node.else_, level=level + 1, marks_sources=marks_sources)


_SECTIONS = {"tools": "tools", "documents": "documents", "add_generation_prompt": "generation prompt"}


def _sections_of(test: nodes.Node) -> set[str]:
    """Sections whose presence `test` asserts: `tools`, `tools is not none`, `a and tools`, `tools | length > 0`."""
    if isinstance(test, nodes.Name):
        return {_SECTIONS[test.name]} if test.name in _SECTIONS else set()
    if isinstance(test, nodes.And):
        return _sections_of(test.left) | _sections_of(test.right)
    if isinstance(test, nodes.Test):
        return _sections_of(test.node) if test.name in ("defined", "true", "iterable", "sequence") else set()
    if isinstance(test, nodes.Filter) and test.name in ("length", "count") and test.node is not None:
        return _sections_of(test.node)
    if isinstance(test, nodes.Compare) and test.ops[0].op in ("ne", "gt"):
        return _sections_of(test.expr)
    if isinstance(test, nodes.Not) and isinstance(test.node, nodes.Test) and test.node.name in ("none", "undefined"):
        return _sections_of(test.node.node)
    return set()


def _statement(method: str, *args: nodes.Expr) -> nodes.ExprStmt:
    call = nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)
    statement = nodes.ExprStmt(call)
    statement.set_lineno(1)
    return statement


def _is_ours(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.ExprStmt)
        and isinstance(node.node, nodes.Call)
        and isinstance(node.node.node, nodes.EnvironmentAttribute)
    )


def _loaded(target: nodes.Node) -> nodes.Expr:
    """The loop variable(s), read back."""
    if isinstance(target, nodes.Name):
        return nodes.Name(target.name, "load")
    if isinstance(target, nodes.Tuple):
        return nodes.Tuple([_loaded(item) for item in target.items], "load")
    return nodes.Const(None)


def _text_size(node: nodes.Node) -> nodes.Const:
    return nodes.Const(sum(len(data.data) for data in node.find_all(nodes.TemplateData)))


def _replace_concat(node: nodes.Node) -> None:
    """Put a size-checked call in the place of every `a ~ b` in the expressions below `node`."""
    for name, value in list(node.iter_fields()):
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concat(child)
            if isinstance(child, nodes.Concat):
                call = nodes.Call(nodes.EnvironmentAttribute("concat_checked"), child.nodes, [], None, None)
                call.set_lineno(child.lineno)
                if isinstance(value, list):
                    value[i] = call
                else:
                    setattr(node, name, call)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (the name and form jinja2 asks for)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body becomes a block that is printed as it is."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


# ---- what templates may call


def _raise_exception(message: object) -> None:
    raise TemplateError(f"chat template refuses: {message}")


def _strftime_now(form: str) -> str:
    if _LONG_WIDTH.search(form):
        raise TemplateError("chat template formats with a width that is too large")
    return datetime.datetime.fromtimestamp(wall_time_s()).strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escaping of jinja2's own filter, as Hugging Face has it."""
    width = indent if isinstance(indent, int) else len(indent or "")
    if width > 64:
        raise TemplateError(f"chat template asks tojson for an indent of {width}; at most 64")
    check_size(value_size(value) * (1 + width))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_text_call(owner: str | bytes, name: str, args: Sequence[Any]) -> None:
    """Refuse calls whose result would be much larger than what goes in."""
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in args):
        raise TemplateError(f"chat template calls {name} with a number above {MAX_NUMBER}")
    if name == "format":
        _check_format(owner, args)
    texts = [value for value in args if isinstance(value, str | bytes)]
    if name == "replace" and len(texts) >= 2:
        old, new = texts[-2], texts[-1]
        check_size(len(owner) + (len(owner) // max(1, len(old)) + 1) * len(new))
    if name == "join":
        joiner = max((len(text) for text in [owner, *texts]), default=0)
        check_size(sum(value_size(value) + joiner * len(value) for value in args if isinstance(value, list | tuple)))


def _check_format(form: str | bytes, values: Any) -> None:
    """Refuse formatting whose result would be very large: long widths, or one large value in many places."""
    if isinstance(form, str) and _LONG_WIDTH.search(form):
        raise TemplateError("chat template formats with a width that is too large")
    check_size(len(form) + len(form) // 2 * max((value_size(value) for value in _listed(values)), default=0))


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _repeat_size(left: Any, right: Any) -> int:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, _SIZED) and isinstance(times, int):
            return len(many) * max(0, times) * (8 if isinstance(many, list | tuple) else 1)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 8
    return 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
