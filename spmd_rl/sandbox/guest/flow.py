"""Follows the values of one test through its text: values travel by value, so a test must not see references.

What a call has returned, or was given, is a copy. In one process it might be an object that the program has kept and
changes later. So a test may not look at such a value once it has asked the program again, nor change it and then ask.
What is equal to a number or text cannot have been changed, so such comparisons are left out.
"""

import ast

CHANGED = "values: the tests change what has travelled and then look at the rest"
LOOKED = "values: the tests look at what has travelled before they asked again"
CHANGE = frozenset(
    "append extend insert remove pop clear sort reverse update add discard setdefault popitem difference_update"
    " intersection_update symmetric_difference_update".split()
)
"""Methods that change a container."""
FRESH = frozenset("len sum str int float bool abs round all any isinstance hash type ord chr range min max".split())
"""Functions whose results are not parts of their arguments, as far as these travel."""
SHOWN = ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp
LOOPS = ast.For, ast.While
_STALE, _INNER = -1, -2  # a list of results; a part of what was given


class Flow:
    """The `reason` why a test would see a reference, empty if none does."""

    def __init__(self, survey, tree, functions):
        self._survey, self.reason = survey, ""
        self._helpers = {each.name for each in functions if any(name in survey.own for name in map(name_of, ast.walk(each)))}
        tests = [each.body for each in functions if each.name.startswith(("test", "check"))]
        first = [line for each in functions if each.name in ("setUp", "setup_method") for line in each.body]
        for body in tests if survey.is_file else [tree.body, *tests]:
            self._clock, self._since, self._flat, self._changed = 0, {}, {}, ""
            self._block(first + body)

    def _block(self, statements):
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
                continue
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            for _ in range(2 if isinstance(statement, LOOPS) else 1):
                self._step(statement)
                for block in blocks:
                    self._block(block)

    def _step(self, statement):
        """Follow a statement without those in it."""
        nodes = list(_head(statement))
        asks, loads = [node for node in nodes if self._asks(node)], [node for node in nodes if self._is_value(node)]
        given = {id(arg) for ask in asks for arg in _args(ask)}
        inner = {id(part) for ask in asks for arg in _args(ask) if isinstance(arg, SHOWN) for part in ast.walk(arg)}
        if asks and self._changed:
            self.reason = self.reason or CHANGED
        self._clock += len(asks)
        for node in nodes:
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                least = min(max(_flatness(side, self._flat) for side in sides), 2)
                held = [side for side in sides if self._holds(side)]
                if len(held) > 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)) and least < 2:
                    self.reason = self.reason or LOOKED
                for side in sides:
                    is_list = isinstance(side, SHOWN) or self._since.get(key_of(side)) == _STALE
                    given.update([id(side)] if least == 2 or (least == 1 and is_list) else [])
            elif isinstance(node, ast.Call) and name_of(node.func) in FRESH:
                given.update(id(arg) for arg in node.args if isinstance(arg, SHOWN))
        for node in nodes:
            many = self._number(node) > 1 if isinstance(node, SHOWN) else False
            if many and id(node) not in given | inner and getattr(statement, "value", None) is not node:
                self.reason = self.reason or LOOKED
        for node in loads:
            key = key_of(node)
            if key in self._since and id(node) not in given | inner:
                if self._since[key] < self._clock:
                    self.reason = self.reason or LOOKED
                if self._changed not in ("", key):
                    self.reason = self.reason or CHANGED
        for node in nodes:
            changes = isinstance(node, ast.Attribute) and node.attr in CHANGE
            if changes or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)):
                self._changed = self._changed or key_of(node.value) * (key_of(node.value) in self._since)
        for node in loads:
            if self._flat.get(key_of(node), 0) < 2 and id(node) in given | inner and asks:
                if id(node) in inner:
                    self._since[key_of(node)] = _INNER
                elif id(node) in {id(arg) for ask in asks for arg in _args(ask)}:
                    self._since.setdefault(key_of(node), self._clock)
        value = getattr(statement, "iter" if isinstance(statement, ast.For) else "value", None)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.For)) and value is not None:
            for key in filter(None, (key_of(part) for target in targets for part in ast.walk(target))):
                self._bind(key, value, isinstance(statement, ast.For))

    def _bind(self, key, value, is_item):
        flatness = _flatness(value, self._flat)
        self._flat[key] = 2 if is_item and flatness else flatness
        self._since.pop(key, None)
        if key not in self._survey.made:
            if isinstance(value, SHOWN) and self._number(value) > 1:
                self._since[key] = _STALE
            elif self._holds(value):
                self._since[key] = self._clock
            elif not self._flat[key] and key_of(value) in self._since:
                self._since[key] = self._since[key_of(value)]

    def _asks(self, node):
        """Return whether an expression has the program do something."""
        if not isinstance(node, ast.Call):
            return False
        own = self._survey.own - self._survey.made
        helper = node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
        return self._survey.root(node.func) or helper in self._helpers or any(name_of(arg) in own for arg in node.args)

    def _number(self, node):
        """Return how often an expression asks; a comprehension does so twice."""
        many = 2 if isinstance(node, SHOWN[4:]) else 1
        return many * sum(self._holds(part) for part in ast.walk(node) if isinstance(part, ast.Call))

    def _holds(self, node):
        """Return whether the value of an expression is, or has as a part, what the program has returned."""
        if isinstance(node, ast.Call):
            if self._asks(node):
                return not self._survey.makes(node)
            return name_of(node.func) not in FRESH and any(map(self._holds, node.args))
        if isinstance(node, ast.Attribute):
            return self._survey.root(node)
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._holds(node.value)
        return isinstance(node, SHOWN[:4]) and any(map(self._holds, ast.iter_child_nodes(node)))

    def _is_value(self, node):
        key = key_of(node)
        return bool(key) and isinstance(node.ctx, ast.Load) and key not in self._survey.made | self._survey.own


def _head(node):
    """Yield the nodes of a statement but those of the statements in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from _head(child)


def _args(call):
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def name_of(node):
    """Return the name that a node is, else an empty text."""
    return node.id if isinstance(node, ast.Name) else ""


def key_of(node):
    """Return what stands for a name or an attribute of `self`, else an empty text."""
    is_own = isinstance(node, ast.Attribute) and name_of(node.value) == "self"
    return f"self.{node.attr}" if is_own else name_of(node)


def _flatness(node, known):
    """Return 2 for what cannot change, 1 for a container of such, else 0. `known`: by name."""
    if isinstance(node, (ast.Constant, ast.JoinedStr, ast.Compare)) or name_of(getattr(node, "func", None)) in FRESH:
        return 2
    if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
        least = min([_flatness(item, known) for item in node.elts], default=2)
        return least if isinstance(node, ast.Tuple) else min(1, least // 2)
    if isinstance(node, ast.Dict):
        return min([_flatness(item, known) for item in node.values], default=2) // 2
    if isinstance(node, ast.BinOp):
        return min(_flatness(node.left, known), _flatness(node.right, known))
    return _flatness(node.operand, known) if isinstance(node, ast.UnaryOp) else known.get(key_of(node), 0)
