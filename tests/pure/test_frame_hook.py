"""The dispatcher, its guards and the frame hook without torch. tests/pure/test_frame_versions.py runs this file under other Pythons."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

from torchsmith.capture import _frame

LOCAL, GLOBAL, GLOBAL_IN, CELL, FIXED, INSTANCE, MODULE_DICT, TYPE_ATTR, GETATTR, SEQ, DICT, CONTENTS, TYPE_OF, PROPERTY = range(14)
IDENTITY, TYPE, EQUALS, LENGTH, KEYS, MISSING = "identity", "type", "equals", "length", "dict_keys", "missing"
KEY = object()


def entry(nodes, guards, inputs, call, recipe=(0, 0), finish=None):
    nodes = tuple((kind, base, arg, key, None) for kind, base, arg, key in nodes)
    guards = tuple((kind, node, value, ()) for kind, node, value in guards)
    return _frame.Entry(nodes, guards, tuple(inputs), len(inputs), call, recipe, finish, "test", None, None)


def first_argument_is(value, call, n_inputs=1):
    return entry([(LOCAL, -1, 0, "x")], [(EQUALS, 0, value)], [0][:n_inputs], call)


def serve(table):
    """A policy for the hook: functions by name -> Dispatcher."""
    asked = []

    def on_frame(key, function):
        assert key is KEY
        asked.append(function.__name__)
        return table.get(function.__name__)

    _frame.setup_hook(on_frame)
    return asked


def dispatcher_of(function, *entries, on_miss=lambda *a: _frame.RUN_PLAIN):
    d = _frame.Dispatcher(None, on_miss, None, function.__code__)
    d.entries = entries
    return d


def test_functions_called_below_are_replaced():
    def helper(x, y=2, *rest, k=3, **more):
        return "native", x

    def other(x):
        return helper(x, 5, 6, k=7, z=8)

    def user(x):
        return helper(x), other(x)

    d = dispatcher_of(
        helper,
        entry(
            [(LOCAL, -1, i, n) for i, n in enumerate(["x", "y", "k", "rest", "more"])],
            [(TYPE, 0, int)],
            range(5),
            lambda *args: ((args),),
        ),
    )
    asked = serve({"helper": d})
    assert _frame.run_hooked(KEY, user, 1) == ((1, 2, 3, (), {}), (1, 5, 7, (6,), {"z": 8}))
    assert asked == ["helper", "other"]
    assert user(1) == (("native", 1), ("native", 1))
    assert _frame.run_hooked(KEY, user, "s")[0] == ("native", "s")
    assert asked == ["helper", "other"]
    assert not _frame.hook_installed()


def test_misses_are_asked_with_the_function_and_its_arguments():
    def helper(x, *rest, k=3, **more):
        return "native"

    asked = []

    def on_miss(d, function, args, kwargs):
        asked.append((function, args, kwargs))
        if args[0] == "compiled":
            return "by the handler"
        if args[0] == "error":
            raise KeyError("handler")
        return _frame.RUN_HOOKED

    d = dispatcher_of(helper, on_miss=on_miss)
    serve({"helper": d})

    def user(v):
        return helper(v, 1, k=2, z=3)

    assert _frame.run_hooked(KEY, user, "compiled") == "by the handler"
    assert _frame.run_hooked(KEY, user, "run") == "native"
    try:
        _frame.run_hooked(KEY, user, "error")
    except KeyError as e:
        assert e.args == ("handler",)
    else:
        raise AssertionError("no error")
    assert asked == [(helper, (v, 1), {"k": 2, "z": 3}) for v in ("compiled", "run", "error")]


def test_closures_methods_and_cells():
    captured = 10

    def helper(x):
        def inner():
            return x + captured

        return inner()

    class A:
        def method(self, x):
            return super().__repr__(), x

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x"), (CELL, -1, 0, "captured")], [(EQUALS, 1, 10)], [0, 1], lambda x, c: (("got", x, c),)))
    m = dispatcher_of(A.method, entry([(LOCAL, -1, 0, "self"), (LOCAL, -1, 1, "x")], [(TYPE, 0, A)], [1], lambda x: (("method", x),)))
    serve({"helper": d, "method": m})

    def user():
        return helper(1), A().method(2)

    assert _frame.run_hooked(KEY, user) == (("got", 1, 10), ("method", 2))
    captured = 11
    assert _frame.run_hooked(KEY, user)[0] == 12


def test_generators_comprehensions_and_classes_run_as_they_are():
    def gen(n):
        for i in range(n):
            yield helper(i)

    def helper(x):
        return x

    def user():
        class Local:
            field = helper(5)

        return list(gen(3)), [helper(i) for i in range(2)], Local.field, max([7], key=helper), sorted([2, 1], key=helper)

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x")], [], [0], lambda x: (-x,)))
    serve({"helper": d})
    assert _frame.run_hooked(KEY, user) == ([0, -1, -2], [0, -1], -5, 7, [2, 1])


def test_nothing_leaks():
    class Thing:
        pass

    def helper(x):
        y = x
        return y

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x")], [(TYPE, 0, Thing)], [], lambda: ("none",)))
    serve({"helper": d})

    def user():
        t = Thing()
        r = weakref.ref(t)
        before = sys.getrefcount(t)
        for _ in range(10):
            assert helper(t) == "none"
        assert sys.getrefcount(t) == before
        return r

    r = _frame.run_hooked(KEY, user)
    assert r() is None
    count = sys.getrefcount(helper), sys.getrefcount(helper.__code__)
    _frame.run_hooked(KEY, user)
    assert (sys.getrefcount(helper), sys.getrefcount(helper.__code__)) == count

    def made():
        def inner(x):
            return x

        serve({"inner": dispatcher_of(inner, first_argument_is(1, lambda x: (2,)))})
        assert _frame.run_hooked(KEY, lambda: inner(1)) == 2
        return weakref.ref(inner)

    ref = made()
    gc.collect()
    assert ref() is None


def test_exceptions_and_recursion():
    def helper(x):
        return x

    def fails(x):
        raise ValueError("graph")

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x")], [(TYPE, 0, int)], [0], fails))
    serve({"helper": d})

    def user(x):
        try:
            return helper(x)
        except ValueError as e:
            return e.args[0], sys._getframe().f_code.co_name

    assert _frame.run_hooked(KEY, user, 1) == ("graph", "user")

    def down(n):
        return 0 if n == 0 else helper_down(n - 1) + 1

    def helper_down(n):
        return down(n)

    h = dispatcher_of(helper_down, entry([(LOCAL, -1, 0, "n")], [(EQUALS, 0, 20)], [0], lambda n: (1000,)))
    serve({"helper_down": h})
    assert _frame.run_hooked(KEY, down, 100) == 1080
    assert _frame.run_hooked(KEY, down, 10) == 10


def test_only_the_thread_that_asked():
    def helper(x):
        return "native"

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x")], [], [], lambda: ("compiled",)))
    serve({"helper": d})
    inside, done, seen = threading.Event(), threading.Event(), []

    def other():
        inside.wait(1200)
        seen.append(helper(1))
        done.set()

    def user():
        inside.set()
        done.wait(1200)
        return helper(1)

    t = threading.Thread(target=other)
    t.start()
    assert _frame.run_hooked(KEY, user) == "compiled"
    t.join()
    assert seen == ["native"]
    assert not _frame.hook_installed()


def test_many_threads():
    def helper(x):
        return "native"

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x")], [(TYPE, 0, int)], [0], lambda x: (x + 1,)))
    serve({"helper": d})
    wrong = []

    def user(i):
        return helper(i), helper("s")

    def work():
        for i in range(500):
            if _frame.run_hooked(KEY, user, i) != (i + 1, "native"):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not _frame.hook_installed()


def test_suspended_regions_run_as_they_are():
    def helper(x):
        return "native"

    d = dispatcher_of(helper, entry([(LOCAL, -1, 0, "x")], [], [], lambda: ("compiled",)))
    serve({"helper": d})

    def user():
        first = helper(1)
        was = _frame.hook_suspend()
        second = helper(1)
        _frame.hook_resume(was)
        return first, second, helper(1)

    assert _frame.run_hooked(KEY, user) == ("compiled", "native", "compiled")


def test_profilers_and_tracers_see_the_calls():
    def helper(x):
        return x

    serve({"helper": dispatcher_of(helper, first_argument_is(1, lambda x: ("compiled",)))})
    names = []

    def user():
        return helper(1), helper(2)

    sys.setprofile(lambda frame, event, arg: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        assert _frame.run_hooked(KEY, user) == ("compiled", 2)
    finally:
        sys.setprofile(None)
    assert "user" in names and "helper" in names


def test_fork():
    def helper(x):
        return "native"

    serve({"helper": dispatcher_of(helper, first_argument_is(1, lambda x: ("compiled",)))})

    def user():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if helper(1) == "compiled" and helper(2) == "native" else 1)
        return os.waitpid(pid, 0)[1]

    assert _frame.run_hooked(KEY, user) == 0
    assert not _frame.hook_installed()


def test_guards_on_objects_notice_changes():
    class Box:
        kind = "box"

        def __init__(self):
            self.a = 1
            self.table = {"k": 5}

    nodes = [
        (LOCAL, -1, 0, "x"), (INSTANCE, 0, 0, "a"), (INSTANCE, 0, 0, "table"), (DICT, 2, 0, "k"), (TYPE_ATTR, 0, 0, "kind"), (TYPE_OF, 0, 0, None),
    ]  # fmt: skip
    rows = [(TYPE, 0, Box), (EQUALS, 1, 1), (TYPE, 2, dict), (EQUALS, 3, 5), (EQUALS, 4, "box"), (MISSING, 0, "extra"), (MISSING, 5, "later")]
    e = entry(nodes, rows, [], lambda: ())
    b = Box()

    def ok():
        got = [e.check((b,), {}, None) for _ in range(3)]
        assert got[0] == got[1] == got[2]
        return got[0]

    assert ok() and e.recorded["dict"] >= 1
    for _ in range(3):
        assert ok()
        b.a = 2
        assert not ok()
        b.a = 1
        b.table["k"] = 6
        assert not ok()
        b.table["k"] = 5
        b.table = {"k": 5}
        assert ok()
        b.extra = 1
        assert not ok()
        del b.extra
        assert ok()
        b.__dict__ = {"a": 1, "table": {"k": 5}}
        assert ok()
        b.__dict__ = {"a": 3, "table": {"k": 5}}
        assert not ok()
        b.__dict__ = {"a": 1, "table": {"k": 5}}
        Box.kind = "bag"
        assert not ok()
        Box.kind = "box"
        Box.later = 1
        assert not ok()
        del Box.later
        assert ok()
        b.__class__ = type("Sub", (Box,), {})
        assert not ok()
        b.__class__ = Box
        b = Box()
        object.__setattr__(b, "a", 1)
        assert ok()
        object.__setattr__(b, "a", 9)
        assert not ok()
        b.a = 1


def test_watched_things_may_die():
    class Box:
        pass

    def made():
        outer, inner = Box(), Box()
        outer.inner, inner.a, inner.table = inner, 1, {"k": 1}
        return outer

    nodes = [(LOCAL, -1, 0, "x"), (INSTANCE, 0, 0, "inner"), (INSTANCE, 1, 0, "a"), (INSTANCE, 1, 0, "table"), (DICT, 3, 0, "k")]
    rows = [(TYPE, 0, Box), (TYPE, 1, Box), (EQUALS, 2, 1), (EQUALS, 4, 1)]
    entries = [entry(nodes, rows, [], lambda: ()) for _ in range(3)]
    gc.freeze()  # the rest of the process is not looked through twenty times
    for round_ in range(20):
        boxes = [made() for _ in range(3)]
        for _ in range(2):
            assert all(e.check((b,), {}, None) for e in entries for b in boxes)
        assert all(e.check((boxes[0],), {}, None) for e in entries)
        boxes[0].inner = made().inner
        assert all(e.check((boxes[0],), {}, None) for e in entries)
        boxes[0].inner.table["k"] = round_ + 2
        assert not any(e.check((boxes[0],), {}, None) for e in entries)
        del boxes[0].inner
        assert not any(e.check((boxes[0],), {}, None) for e in entries)
        if round_ % 5 == 0:
            entries[0] = entry(nodes, rows, [], lambda: ())
        gc.collect()
    gc.unfreeze()


def test_a_dict_that_comes_later_is_noticed():
    def f():
        pass

    class Slots:
        __slots__ = ("__weakref__", "a")

    e = entry([(LOCAL, -1, 0, "x")], [(MISSING, 0, "mark")], [], lambda: ())
    for _ in range(3):
        assert e.check((f,), {}, None) and e.check((Slots(),), {}, None)
    e = entry([(LOCAL, -1, 0, "x")], [(MISSING, 0, "mark")], [], lambda: ())
    for _ in range(3):
        assert e.check((f,), {}, None)
    f.mark = 1
    assert not e.check((f,), {}, None)
    del f.mark
    assert e.check((f,), {}, None)


def test_globals_are_noticed():
    space = {"a": 1, "__builtins__": {"later": 5}}
    e = entry([(GLOBAL, -1, 0, "a"), (GLOBAL, -1, 0, "later")], [(EQUALS, 0, 1), (EQUALS, 1, 5)], [], lambda: ())
    for i in range(10):
        assert e.check((), space, None)
        assert e.check((), space, None)
        space["other"] = i
        assert e.check((), space, None)
        space["a"] = 2
        assert not e.check((), space, None)
        space["a"] = 1
        space["later"] = 6
        assert not e.check((), space, None)
        del space["later"]
        space["__builtins__"]["later"] = 7
        assert not e.check((), space, None)
        space["__builtins__"]["later"] = 5


TESTS = [f for name, f in sorted(globals().items()) if name.startswith("test_")]
if __name__ == "__main__":
    for test in TESTS:
        test()
    print(f"{len(TESTS)} ok on {sys.version.split()[0]}")
