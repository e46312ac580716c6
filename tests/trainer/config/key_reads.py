"""Which fields of a configuration tree some source reads: types followed through its syntax.

An attribute counts as a read only where its base is known to be a config dataclass: by an
annotation, by an assignment, by what `self` was given, or because the base itself was reached
through the name of a section (`anything.optim.lr`). `vars(section)` reads all of a section, and
`f(section, "name")` that field; `getattr(section, name)` reads the fields that its function names.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

Classes = frozenset[type]
Names = dict[str, Classes]
NONE: Classes = frozenset()
PLAIN = (ast.Constant, ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.alias)
"""Syntax without parts in which a key could be read; a name alone reads none."""


class Tree:
    """The dataclasses under a root, and the type of each of their fields."""

    def __init__(self, root: type) -> None:
        self.fields: dict[type, Names] = {}
        self.by_section: dict[str, Classes] = {}
        self.owners: dict[str, Classes] = {}
        self._add(root)
        self.by_name = {cls.__name__: cls for cls in self.fields}

    def _add(self, cls: type) -> None:
        if cls in self.fields:
            return
        self.fields[cls] = {}
        for base in cls.__bases__:
            if dataclasses.is_dataclass(base):
                self._add(base)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind = hints[field.name]
            if not dataclasses.is_dataclass(kind):
                self.fields[cls][field.name] = NONE
                continue
            assert isinstance(kind, type), "a section's type is a class"
            self.fields[cls][field.name] = frozenset({kind})
            self.by_section[field.name] = self.by_section.get(field.name, NONE) | {kind}
            self.owners[field.name] = self.owners.get(field.name, NONE) | {cls}
            self._add(kind)


class Reads(ast.NodeVisitor):
    """Walks sources twice: what `self` holds and functions return, then what is read."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.found: set[tuple[type, str]] = set()
        self.returns: dict[str, Classes] = defaultdict(frozenset)
        self.attributes: dict[str, Names] = defaultdict(dict)
        self.bases: dict[str, list[str]] = {}
        self.protocols: dict[str, set[str]] = {}
        self.names: list[Names] = [{}]
        self.inside: list[str] = []
        self.functions: list[ast.AST] = []

    def of(self, node: ast.AST | None) -> Classes:
        """The config dataclasses that an expression may be; what it reads is noted."""
        match node:
            case ast.Name(id=name):
                return next((known[name] for known in reversed(self.names) if name in known), NONE)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(base, name)
            case ast.Call():
                return self._call(node)
            case ast.IfExp(body=first, orelse=second):
                return self.of(first) | self.of(second)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return NONE.union(*(self.of(part) for part in parts))
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.of(value)
        return NONE

    def annotated(self, node: ast.AST | None) -> Classes:
        """The config dataclasses that an annotation names, or whose fields its protocol has."""
        names = names_in(node) if node else frozenset()
        found = {self.tree.by_name[name] for name in names & self.tree.by_name.keys()}
        for name in names & self.protocols.keys():
            asked = self.protocols[name]
            found |= {kind for kind, fields in self.tree.fields.items() if asked <= fields.keys()}
        return frozenset(found)

    def _attribute(self, base: ast.expr, name: str) -> Classes:
        if isinstance(base, ast.Name) and base.id == "self" and self.inside:
            held = self._held(self.inside[-1], name)
            if held:
                return held
        kinds = self.of(base)
        if not kinds:
            self._note(self.tree.owners.get(name, NONE), name)
            return self.tree.by_section.get(name, NONE)
        self._note(kinds, name)
        own = NONE.union(*(self.tree.fields[kind].get(name, NONE) for kind in kinds))
        return own or self.tree.by_section.get(name, NONE)

    def _held(self, cls: str, name: str) -> Classes:
        own = self.attributes[cls].get(name, NONE)
        return own.union(*(self._held(base, name) for base in self.bases.get(cls, ())))

    def _call(self, node: ast.Call) -> Classes:
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                pass
            case _:
                return NONE
        first = self.of(node.args[0]) if node.args else NONE
        for kind in first:
            if name == "vars" or (name == "asdict" and self._is_flat(kind)):
                self._note(first, *self.tree.fields[kind])
        if first:
            by_name = name == "getattr" and not isinstance(node.args[1], ast.Constant)
            for within in self.functions[-1:] if by_name else [node]:
                self._note(first, *strings_in(within))
        return first if name == "replace" else self.returns[name]

    def _is_flat(self, kind: type) -> bool:
        """Whether a section holds no other: `asdict` of a whole tree is there to write it down."""
        return not any(self.tree.fields[kind].values())

    def _note(self, kinds: Iterable[type], *names: str) -> None:
        for kind in kinds:
            self.found |= {(kind, name) for name in names if name in self.tree.fields[kind]}

    def generic_visit(self, node: ast.AST) -> None:
        """As the base class, but past what holds no expression: two thirds of all nodes."""
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, PLAIN):
                self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        declared = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        if "Protocol" in self.bases[node.name] and declared:
            self.protocols[node.name] = {ast.unparse(part.target) for part in declared}
        self.inside.append(node.name)
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                self._hold(ast.unparse(part.target), self.annotated(part.annotation))
            else:
                self.visit(part)  # how a field is declared reads no key
        self.inside.pop()

    def _hold(self, name: str, kinds: Classes) -> None:
        held = self.attributes[self.inside[-1]]
        held[name] = held.get(name, NONE) | kinds

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        returned = self.annotated(node.returns)
        self.returns[node.name] |= returned
        if self.inside and any(isinstance(d, ast.Name) for d in node.decorator_list):
            self._hold(node.name, returned)  # a property
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.names.append({one.arg: self.annotated(one.annotation) for one in arguments})
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()
        self.names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._bind(one, self.of(value))
            else:
                self._bind(target, self.of(node.value))
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, self.annotated(node.annotation))
        if node.value is not None:
            self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self.of(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, self.of(node.iter))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.of(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.of(node)
        self.generic_visit(node)

    def _bind(self, target: ast.AST, kinds: Classes) -> None:
        match target:
            case ast.Name(id=name):
                self.names[-1][name] = self.names[-1].get(name, NONE) | kinds
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if self.inside:
                self._hold(name, kinds)


@cache
def names_in(node: ast.AST) -> frozenset[str]:
    """Every name of a piece of syntax, which is walked several times."""
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def strings_in(node: ast.AST) -> list[str]:
    """Every string constant of a piece of syntax."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def reads(root: type, modules: Sequence[ast.Module]) -> set[tuple[type, str]]:
    """(dataclass, field) for every field under `root` that the modules read."""
    walker = Reads(Tree(root))
    for _ in range(2):
        walker.found.clear()
        for module in modules:
            walker.visit(module)
    return walker.found


def keys_that_nothing_reads(root: type, modules: Sequence[ast.Module]) -> list[str]:
    """Dotted keys, sections among them, whose field no module reads."""
    tree, found = Tree(root), reads(root, modules)

    def is_read(cls: type, name: str) -> bool:
        kin = {kind for kind, field in found if field == name}
        return any(issubclass(cls, kind) or issubclass(kind, cls) for kind in kin)

    def walk(cls: type, prefix: str) -> Iterator[str]:
        for name, kinds in tree.fields[cls].items():
            if not is_read(cls, name):
                yield prefix + name
            for kind in kinds:
                yield from walk(kind, f"{prefix}{name}.")

    return list(walk(root, ""))
