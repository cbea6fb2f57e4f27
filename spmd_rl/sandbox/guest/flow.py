"""Follows the values of one test through its text: values travel by value, so a test must not see references.

What a call has returned, or was given, is a copy. In one process it might be an object that the program has kept and
changes later. So a test may not look at such a value once it has asked the program again, nor change it and then ask.
What is equal to a number or text cannot have been changed, so such comparisons are left out.
"""

import ast

CHANGED = "values: the tests change what has travelled and then look at the rest"
LOOKED = "values: the tests look at what has travelled before they asked again"
CHANGE = {name for kind in (list, dict, set) for name in set(dir(kind)) - set(dir(tuple)) - set(dir(frozenset))}
CHANGE -= {"get", "items", "keys", "values", "fromkeys", *(name for name in CHANGE if name.startswith("__"))}
"""Methods that change a container."""
FRESH = {"len", "sum", "str", "int", "float", "bool", "abs", "round", "all", "any", "isinstance", "type", "range"}
"""Functions whose results are not parts of their arguments, as far as these travel."""
NUMBERS = {"int", "float", "round", "abs", "chr", "sum"}
"""Functions whose arguments are numbers or texts, or that take each as it comes."""
LISTS = ast.ListComp, ast.DictComp
SHOWN = (ast.List, ast.Tuple, ast.Set, ast.Dict, *LISTS)
LOOPS = ast.For, ast.While
_STALE, _INNER = -1, -2  # a list of results; a part of what was given


class Flow:
    """The `reason` why a test would see a reference, empty if none does."""

    def __init__(self, survey, tree, functions):
        self._survey, self.reason = survey, ""
        self._helpers = {
            each.name for each in functions if any(name in survey.own for name in map(name_of, ast.walk(each)))
        }
        tests = [each.body for each in functions if each.name.startswith(("test", "check"))]
        first = [line for each in functions if each.name in ("setUp", "setup_method") for line in each.body]
        for body in tests or [[]]:
            self._clock, self._since, self._parts, self._changed = 0, {}, {}, ""
            self._flat = dict.fromkeys(survey.flat, 2)
            self._block(tree.body + first + body)

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
        args = [arg for ask in asks for arg in _args(ask)]
        inner = {id(part) for arg in args if isinstance(arg, SHOWN) for part in ast.walk(arg)}
        known, given = {id(node) for node in nodes for node in self._unseen(node)}, {id(arg) for arg in args} | inner
        if asks and self._changed:
            self._found(CHANGED)
        self._clock += len(asks)
        for node in nodes:
            is_list = isinstance(node, (ast.List, ast.Tuple, ast.Dict, *LISTS)) and id(node) not in known | given
            if is_list and self._number(node) > 1 and getattr(statement, "value", None) is not node:
                self._found(LOOKED)
            if self._flat.get(key_of(node), 0) == 2 or not self._is_value(node) or key_of(node) not in self._since:
                continue
            if id(node) not in known | given and self._since[key_of(node)] < self._clock:
                self._found(LOOKED)
            if id(node) not in given and self._changed not in ("", key_of(node)):
                self._found(CHANGED)
        for node in nodes:
            is_method = isinstance(node, ast.Attribute) and node.attr in CHANGE
            if is_method or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)):
                within = [each for each in ast.walk(node.value) if key_of(each) in self._since]
                if within and within[0] is not node.value:
                    self._found(CHANGED)  # a part of it, which may be in it twice
                self._changed = self._changed or (key_of(within[0]) if within else "")
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") in CHANGE
                and any(map(self._holds, node.args))
            ):
                self._since[key_of(node.func.value)] = _STALE
        for node in loads:
            if self._flat.get(key_of(node), 0) < 2 and id(node) in given:
                self._since.setdefault(key_of(node), self._clock)
                parts = {key for key, whole in self._parts.items() if whole == key_of(node)}
                self._since.update(dict.fromkeys(parts | ({key_of(node)} if id(node) in inner else set()), _INNER))
        value = getattr(statement, "iter" if isinstance(statement, ast.For) else "value", None)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.For)) and value is not None:
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(getattr(part, "ctx", None), ast.Store):
                    self._bind(key_of(getattr(part, "value", part)) or key_of(part), value, statement)

    def _bind(self, key, value, statement):
        flatness = _flatness(value, self._flat)
        self._flat[key] = 2 if isinstance(statement, ast.For) and flatness else flatness
        self._since.pop(key, None)
        self._parts.pop(key, None)
        if key in self._survey.made or self._flat[key] == 2:
            return
        if isinstance(value, SHOWN) and self._number(value) > 1:
            self._since[key] = _STALE
        elif self._holds(value):
            self._since[key] = self._clock
        elif key_of(value) in self._since:
            self._since[key] = self._since[key_of(value)]
        if isinstance(value, ast.Subscript) and not isinstance(value.slice, ast.Slice):
            self._parts[key] = key_of(value.value)

    def _unseen(self, node):
        """Return the parts of an expression that it is a number or text if it is what a test expects."""
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            least = max(_flatness(side, self._flat) for side in sides)
            order = isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
            return [
                side
                for side in sides
                if least == 2
                or order
                or (least == 1 and (isinstance(side, SHOWN) or self._since.get(key_of(side)) == _STALE))
            ]
        if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Add, ast.Mult)):
            return [node.left, node.right]
        return node.args if isinstance(node, ast.Call) and name_of(node.func) in NUMBERS else []

    def _found(self, reason):
        self.reason = self.reason or reason

    def _asks(self, node):
        """Return whether an expression has the program do something."""
        if not isinstance(node, ast.Call):
            return False
        own = self._survey.own - self._survey.made
        helper = node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
        if helper == "sleep":  # a thread of the program may do something
            return True
        return self._survey.root(node.func) or helper in self._helpers or any(name_of(arg) in own for arg in node.args)

    def _number(self, node):
        """Return how often an expression asks for its items; a comprehension does so twice."""
        many, parts = 1, [node]
        if isinstance(node, LISTS):
            many, parts = 2, [node.elt] if isinstance(node, ast.ListComp) else [node.value]
        return many * sum(self._holds(each) for part in parts for each in ast.walk(part) if isinstance(each, ast.Call))

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
    if isinstance(node, ast.Subscript):
        return (
            _flatness(node.value, known)
            if isinstance(node.slice, ast.Slice)
            else 2 * min(_flatness(node.value, known), 1)
        )
    if isinstance(node, ast.BinOp):
        return min(_flatness(node.left, known), _flatness(node.right, known))
    return _flatness(node.operand, known) if isinstance(node, ast.UnaryOp) else known.get(key_of(node), 0)


def is_constant(node):
    """Return whether an expression is a number, a text, a truth or None, or a tuple of such."""
    return _flatness(node, {}) == 2
