"""The judge of tests that are code. It runs in a sandbox of its own, and uses the standard library only, because the sandbox gets its text.

The program under test runs in another sandbox. Names that the tests do not define themselves are functions and classes of the program. A call sends its arguments
there. Plain data comes back as it is. Any other object stays there, and a `Remote` forwards the operations of the tests on it. An object is never compared with a
value of the tests, so the program learns no expected value.
"""

import ast
import builtins
import collections
import itertools
import operator
import sys
import types

host = types.SimpleNamespace()
"""The functions `ask`, `packed` and `unpacked` of the sandbox's server."""
functions = []
"""The functions of the tests that the program has got. It calls them by `@` and their index."""
remotes = {}
"""The objects of the program that the tests have got, so that equal numbers are one object."""
errors = {}
"""The classes of exceptions of the program. Only classes can be caught."""


_FORWARDED = "setattr call iter next len str repr bool hash enter getitem setitem delitem"
_BETWEEN_OBJECTS = "eq lt le gt ge add sub mul"


class Stub:
    """A function, a class or another value of the program."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        stub = Stub(f"{self.__name__}.{name}")
        return asked("value", (stub,), {}) if name.isupper() else stub  # such as a member of an enumeration

    def __call__(self, *args, **kwargs):
        return asked(self.__name__, args, kwargs, on=False)

    def __instancecheck__(self, value):
        return is_remote(value) and asked("isinstance", (value, self), {}) is True

    __hash__ = object.__hash__


class Remote:
    """An object of the program."""

    def __init__(self, name):
        vars(self)["__name__"] = name

    def __exit__(self, *error):
        asked("exit", (self,), {})  # its result could hide a failure

    def __await__(self):
        return asked("await", (self,), {})
        yield

    def __getattr__(self, name):
        if name.startswith("__"):  # other packages would use it to compare
            raise AttributeError(name)
        return asked("getattr", (self, name), {})


def _forwarded(operation):
    return lambda self, *args, **kwargs: asked(operation, (self, *args), kwargs)


def _between_objects(operation):
    def between(self, other):
        if type(other) is Remote:
            return asked(operation, (self, other), {})
        if type(other) in (list, dict, set):  # the object may be of a class that extends them
            value = asked("plain", (self,), {})
            if type(value) is type(other):
                return getattr(operator, operation)(value, other)
        return NotImplemented

    return between


def _on_value(operation):
    return lambda self, *args: operation(asked("value", (self,), {}), *args)


for _operation in _FORWARDED.split():
    setattr(Remote, f"__{_operation}__", _forwarded(_operation))
# A search reads all items first. If it ended at the value, the program would learn this value.
Remote.__contains__ = lambda self, value: value in [*self]
for _operation in _BETWEEN_OBJECTS.split():
    setattr(Remote, f"__{_operation}__", _between_objects(_operation))
    setattr(Stub, f"__{_operation}__", _on_value(getattr(operator, _operation)))
for _operation in (iter, len, str, bool, hash, operator.getitem, operator.contains):
    setattr(Stub, f"__{_operation.__name__}__", _on_value(_operation))


class Names(dict):
    """The names of Python, and a stub for every other name."""

    def __missing__(self, name):
        return Stub(name)


def is_remote(value):
    """Returns whether a value is an object of the program, see `remote`."""
    return type(value) is Remote or type(value).__module__ == "solution"


def kept(value):
    """Returns the data for a value that is not plain data."""
    if type(value) is Stub or is_remote(value):
        return {"kept": vars(value)["__name__"]}
    if hasattr(value, "__next__"):
        return {"made": ["iter", [kept(value.__next__), {"opaque": "end"}]]}
    if isinstance(value, (collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)):
        return host.packed(list(value), 0, kept)
    if not callable(value):
        return {"opaque": type(value).__name__}
    functions.append(value)
    return {"kept": f"@{len(functions) - 1}"}


def remote(name, data=None):
    """Returns an object of the program. With `data`, it is of a class that extends immutable data, such as a named tuple, so it is this data, too."""
    if name not in remotes:
        remotes[name] = found = Remote(name)
        if data is not None:
            own = {"__module__": "solution", "__getattr__": lambda self, name: getattr(found, name)}
            remotes[name] = type("Own", (tuple if type(data) is list else type(data),), own)(data)
            vars(remotes[name])["__name__"] = name
    return remotes[name]


def asked(name, args, kwargs, on=True):
    """Calls a function of the program, or performs an operation on its objects. Returns its result or raises its exception, and copies the changes to lists, dictionaries and sets."""
    data = host.packed(list(args), 0, kept), host.packed(kwargs, 0, kept)
    reply = host.ask({"name": name, "args": data[0], "kwargs": data[1], "back": True, "on": on})
    while "callback" in reply:
        try:
            given, named = host.unpacked([reply["args"], reply["kwargs"]], remote)
            value = functions[reply["callback"]](*given, **named)
            answer = {"value": host.packed(value, 0, kept)}
        except Exception as error:
            answer = {"raise": [type(error).__name__, str(error)]}
        reply = host.ask({"answer": answer})
    if "raise" in reply:
        raise exception_of(*reply["raise"])
    for old, new in zip([*args, *kwargs.values()], host.unpacked(reply["args"], remote), strict=False):
        if type(old) is type(new) is list:
            old[:] = new
        elif type(old) is type(new) in (dict, set):
            old.clear()
            old.update(new)
    return host.unpacked(reply["value"], remote)


def error_class(name):
    """Returns the class in the tests for a class of exceptions of the program."""
    return errors.setdefault(name, type(name, (Exception,), {}))


def exception_of(name, message, args=None, names=(), state=None, text=""):
    """Returns an exception of the program. If it is a class of the program, `names` are its own name and its bases' names. Unknown exceptions become a RuntimeError."""
    try:
        names = [one for one in names if not hasattr(builtins, one)]
        kind = getattr(builtins, name, object)  # the program may have forged the name
        if issubclass(kind, Exception) and (own := [*map(error_class, names)]):
            error = type(own[0].__name__, (*own, kind), {"__str__": lambda error: text})()
            vars(error).update(host.unpacked(state, remote))
            error.args = host.unpacked(args, remote)
            return error
        if issubclass(kind, Exception):
            return kind(message) if args is None else kind(*host.unpacked(args, remote))
    except Exception:
        pass
    return RuntimeError(message)


def names_of_python(texts):
    """Returns the names that belong to the program although Python or one of its modules defines them, such as `gcd`: if the tests use no other name of the program, the
    functions that they call. Functions of modules come before Python's own functions."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    imported = {getattr(node, "module", None) for node in nodes}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for field in ("name", "asname", "arg"):  # of functions, classes, imports and arguments
        made |= {getattr(node, field, None) for node in nodes}
    if "solution" in made | imported or names - made - vars(builtins).keys():
        return []
    called = {
        node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    known = {name: vars(builtins)[name] for name in called - made}
    errors = [
        name for name, value in known.items() if isinstance(value, type) and issubclass(value, Exception)
    ]
    known = {name: value for name, value in known.items() if name not in errors}
    return [name for name, value in known.items() if getattr(value, "__module__", "") != "builtins"] or [
        *known
    ]


def of_solution(name):
    """Returns an attribute of the module `solution`, from which tests import."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        if name[0].isupper() and asked("error", (Stub(name),), {}) is True:
            return error_class(name)
    except Exception:  # the program has no such name
        pass
    return Stub(name)


async def awaited(value):
    """Lets `asyncio.run` wait for objects of the program."""
    return await value


def run_test(test, method=""):
    """Runs a test function, or a method of a class of tests, for each set of its parameters."""
    marks = [*getattr(test, "pytestmark", []), *getattr(getattr(test, method, None), "pytestmark", [])]
    given = [mark for mark in marks if mark.name == "parametrize"]
    marks = [
        {**dict(zip(("argnames", "argvalues"), mark.args, strict=False)), **mark.kwargs} for mark in given
    ]
    marks = [(mark["argnames"], mark["argvalues"]) for mark in marks]
    for values in itertools.product(*(values for _, values in marks)):
        arguments = {}
        for (names, _), value in zip(marks, values, strict=True):
            if type(value).__name__ == "ParameterSet":
                value = value.values
            elif isinstance(names, str) and "," not in names:
                value = [value]
            names = names.replace(",", " ").split() if isinstance(names, str) else names
            arguments |= zip(names, value, strict=True)
        function = test
        if method:
            instance = test()
            function = getattr(instance, method)
            for name in ("setup_class", "setUpClass", "setup_method", "setUp"):
                if hook := getattr(instance, name, None):
                    hook(*[function][: hook.__code__.co_argcount - 1])  # as pytest, which may pass the method
        result = function(**arguments)
        if isinstance(result, types.CoroutineType):
            sys.modules["asyncio"].run(result)


def main(ask, packed, unpacked):
    """Runs the tests that the host sends. Sends back the reason for each failure, or an empty text."""
    vars(host).update(ask=ask, packed=packed, unpacked=unpacked)
    job = ask({})
    solution = types.ModuleType("solution")
    solution.__getattr__ = of_solution
    sys.modules["solution"] = solution
    space = {"__builtins__": Names(vars(builtins)), "__name__": "tests", "stub": Stub, "_run_test": run_test}
    names = [job["name"]] if job["name"] else names_of_python([job["setup"], *job["code"]])
    space |= {name: Stub(name) for name in names}
    if "async" in job["setup"]:
        import asyncio

        run = asyncio.run
        asyncio.run = lambda main, **how: run(awaited(main), **how)
    exec(job["setup"], space)
    for code in job["code"]:
        why = ""
        try:
            exec(code, space)
        except BaseException as error:  # `pytest.fail` raises one
            why = f"{type(error).__name__} {error}"
        ask({"why": why})
