"""What may not appear in `schedule`, `runtime` and `sim`: wall clocks, threads, global randomness, unordered iteration.

`violations(source)` reads one module's text with `ast`. Sets are recognised where they are written: literals,
`set(...)`, set operators, `asyncio.all_tasks()`, and names or `self` attributes that the same function or class makes
or annotates as sets. What only asks a set (`in`, `len`, `sorted`, `min`, `any`, …) is fine.
"""

from __future__ import annotations

import ast

BANNED_MODULES = {
    *("time", "random", "uuid", "secrets", "threading", "concurrent", "multiprocessing", "subprocess"),
    *("socket", "signal", "datetime", "sched", "queue", "numpy.random"),
}
BANNED_ATTRIBUTES = {
    *("os.urandom", "os.getpid", "os.environ", "os.getenv"),
    *("asyncio.to_thread", "asyncio.wait", "asyncio.as_completed", "asyncio.run", "asyncio.new_event_loop"),
}
BANNED_METHODS = {"run_in_executor", "call_soon_threadsafe", "run_coroutine_threadsafe", "to_thread"}
BANNED_BUILTINS = {"id": "an address", "hash": "salted per process", "open": "a file", "input": "a person"}
NUMPY_RANDOM = ("np.random.", "numpy.random.")

# What takes an iterable and keeps, or depends on, its order.
ORDER_KEEPING = {
    "list",
    "tuple",
    "enumerate",
    "zip",
    "map",
    "filter",
    "iter",
    "reversed",
    "sum",
    "dict",
    "deque",
}
ORDER_FREE = {"sorted", "min", "max", "any", "all", "len", "set", "frozenset"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}


def violations(source: str, name: str = "<source>") -> list[str]:
    """One line per violation, `name:line: what`."""
    tree = ast.parse(source)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        found += _banned(node)
    _Sets(found).visit(tree)
    return [f"{name}:{line}: {what}" for line, what in sorted(found)]


def _banned(node: ast.AST) -> list[tuple[int, str]]:
    if isinstance(node, ast.Import):
        return [(node.lineno, f"import {alias.name}") for alias in node.names if _is_banned_module(alias.name)]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        if _is_banned_module(node.module) or BANNED_ATTRIBUTES & set(whole):
            return [(node.lineno, f"from {node.module} import {', '.join(a.name for a in node.names)}")]
    if isinstance(node, ast.Attribute):
        dotted = _dotted(node)
        if dotted in BANNED_ATTRIBUTES or node.attr in BANNED_METHODS:
            return [(node.lineno, dotted or node.attr)]
        if dotted.startswith(NUMPY_RANDOM) and dotted.count(".") == 2 and not dotted.endswith(".Generator"):
            return [(node.lineno, dotted)]
    if isinstance(node, ast.Name) and node.id in BANNED_BUILTINS and isinstance(node.ctx, ast.Load):
        return [(node.lineno, f"{node.id}: {BANNED_BUILTINS[node.id]}")]
    return []


def _is_banned_module(module: str) -> bool:
    return module in BANNED_MODULES or module.split(".")[0] in BANNED_MODULES


def _dotted(node: ast.expr) -> str:
    """`a.b.c` as text, or empty where it is no plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


class _Sets(ast.NodeVisitor):
    """Iteration over sets; `names` are the set-valued names of the present function and class."""

    def __init__(self, found: list[tuple[int, str]]) -> None:
        self.found = found
        self.names: set[str] = set()
        self.order_free: set[ast.AST] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        fields = {
            f"self.{s.target.id}"
            for s in node.body
            if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and _annotates_set(s.annotation)
        }
        attributes = {name for name in self._made(node) if name.startswith("self.")}
        self._within(node, fields | attributes)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments = {a.arg for a in every if a.annotation is not None and _annotates_set(a.annotation)}
        self._within(node, arguments | self._made(node))

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 (ast's names)

    def _within(self, node: ast.AST, names: set[str]) -> None:
        outer, self.names = self.names, self.names | names
        self.generic_visit(node)
        self.names = outer

    def _made(self, scope: ast.AST) -> set[str]:
        made: set[str] = set()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and self._is_set(node.value):
                made |= {name for target in node.targets if (name := _dotted(target))}
            elif isinstance(node, ast.AnnAssign) and _annotates_set(node.annotation):
                made.add(_dotted(node.target))
        return made

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._flag(node.iter, "a loop over a set")
        self.generic_visit(node)

    visit_AsyncFor = visit_For  # noqa: N815

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        if node not in self.order_free:
            for generator in node.generators:
                self._flag(generator.iter, "a comprehension over a set")
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = _comprehension  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else _dotted(node.func)
        if called in ORDER_FREE:
            self.order_free.update(node.args)
        elif called in ORDER_KEEPING or called in ("join", "fromkeys", "extend", "gather"):
            for argument in node.args:
                self._flag(argument, f"{called} of a set")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args:
            self._flag(node.func.value, "pop from a set")
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        if node not in self.order_free:
            self._flag(node.value, "a set unpacked")
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self.order_free.update(node.elts)  # a set unpacked into a set keeps no order
        self.generic_visit(node)

    def _flag(self, node: ast.expr, what: str) -> None:
        inner = node.value if isinstance(node, ast.Starred) else node
        if self._is_set(inner):
            self.found.append((node.lineno, what))

    def _is_set(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            return _dotted(node) in self.names
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
            return self._is_set(node.left) or self._is_set(node.right)
        if isinstance(node, ast.Call):
            called = _dotted(node.func)
            if called in ("set", "frozenset", "asyncio.all_tasks"):
                return True
            return (
                isinstance(node.func, ast.Attribute) and node.func.attr in SET_METHODS and self._is_set(node.func.value)
            )
        return False


def _annotates_set(annotation: ast.expr) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return _dotted(base).rsplit(".", 1)[-1] in ("set", "frozenset", "Set", "MutableSet", "AbstractSet")
