"""Instructions that are run alone, and frames that go on in their middle, as code objects: each gives what the whole function gives."""

from __future__ import annotations

import types

import pytest

from torchsmith.capture import assemble
from torchsmith.capture.bytecode import decode

_NOTHING = object()  # a null on the stack


def _moves(ins, values, stack):
    """Instructions that only move values; False for any other."""
    if ins.name in ("LOAD_FAST", "LOAD_FAST_CHECK"):
        stack.append(values[ins.arg])
    elif ins.name == "LOAD_FAST_LOAD_FAST":
        stack += [values[ins.arg >> 4], values[ins.arg & 15]]
    elif ins.name == "STORE_FAST":
        values[ins.arg] = stack.pop()
    elif ins.name == "STORE_FAST_LOAD_FAST":
        values[ins.arg >> 4] = stack.pop()
        stack.append(values[ins.arg & 15])
    elif ins.name == "STORE_FAST_STORE_FAST":
        values[ins.arg >> 4], values[ins.arg & 15] = stack.pop(), stack.pop()
    elif ins.name == "LOAD_CONST":
        stack.append(ins.value)
    elif ins.name == "PUSH_NULL":
        stack.append(_NOTHING)
    elif ins.name in ("POP_TOP", "END_FOR"):
        stack.pop()
    elif ins.name == "COPY":
        stack.append(stack[-ins.arg])
    elif ins.name == "SWAP":
        stack[-1], stack[-ins.arg] = stack[-ins.arg], stack[-1]
    else:
        return ins.name in ("NOP", "PRECALL", "KW_NAMES", "RESUME")
    return True


def stepped(fn, *args, rest_after=None):
    """The function's result, each instruction that works on values run alone; after `rest_after` of them the rest."""
    code = fn.__code__
    c = decode(code)
    k, steps = 0, 0
    values, stack = dict(enumerate(args)), []
    while True:
        ins = c.instrs[k]
        if ins.name in assemble._ALWAYS:
            k = ins.value
        elif ins.name == "RETURN_VALUE":
            return stack[-1], steps
        elif ins.name == "RETURN_CONST":
            return ins.value, steps
        elif _moves(ins, values, stack):
            k += 1
        else:
            slots, shape = tuple(sorted(values)), tuple(v is not _NOTHING for v in stack)
            state = [values[s] for s in slots] + [v for v in stack if v is not _NOTHING]
            names = next((i.arg for i in c.instrs[max(k - 2, 0) : k] if i.name == "KW_NAMES"), None) if ins.name == "CALL" else None
            if steps == rest_after and not names:
                body = assemble.rest(code, k, slots, shape, state[len(slots) :])
                run = types.FunctionType(body, fn.__globals__)
                return run(*(values.get(s) for s in range(body.co_argcount))), steps
            steps += 1
            body = assemble.step(code, ins, slots, shape, False, slots, names, slots)
            out = types.FunctionType(body, fn.__globals__)(*state)
            jumped = type(out) is list
            shape = (*shape[: len(shape) - assemble.touches(ins)], *assemble.pushes(ins, jumps=jumped))
            values = dict(zip(slots, out, strict=False))
            rest = iter(out[len(slots) :])
            stack = [next(rest) if real else _NOTHING for real in shape]
            k = ins.value + (assemble.AFTER_LOOP if ins.name == "FOR_ITER" else 0) if jumped else k + 1


def loops(a, b):
    s = 0
    for i in range(a):
        if i % 2:
            continue
        s += i * b
        if s > 50:
            break
    else:
        s -= 1
    return s, {"k": s}, f"{s:>4}{a!r}"


def containers(a, b):
    out = []
    while a > 0 and b:
        a -= 1
        out.append(a)
        out[0] = max(out[0], a)
    c, *d = out
    return sorted(out, key=abs), c, d, out[1:2], (a or b), not a, a is None, 1 in out, str(a).upper(), {"a": 1}, [*d], {**{"a": 1}}


def calls(a, b):
    import os.path as p
    from os import sep

    x = list(range(a))
    del x[0]
    return x, p.join("a", "b"), sep, -a, ~b, x and a, f"{a}{b!r:>5}", a if b else None, a < b < 5, print("text", a, sep="-", end="\n")


@pytest.mark.parametrize("fn", [loops, containers, calls])
@pytest.mark.parametrize("args", [(5, 3), (3, 1), (9, 9)])
def test_instructions_alone(fn, args):
    want = fn(*args)
    got, steps = stepped(fn, *args)
    assert got == want and steps > 20
    for k in range(0, steps, 7):
        assert stepped(fn, *args, rest_after=k)[0] == want


def handled(a):
    t = 0
    try:
        for i in range(a):
            t += i
            int("x" if i == 2 else "1")
    except ValueError:
        t *= 100
    finally:
        t += 1
    return t


def test_the_rest_of_a_frame_keeps_its_handlers():
    c = decode(handled.__code__)
    k = next(i.index for i in c.instrs if i.name == "BINARY_OP")
    it = iter(range(5))
    next(it)
    body = assemble.rest(handled.__code__, k, (0, 1, 2), (True, True, True), (it, 0, 0))
    assert types.FunctionType(body, globals())(5, 0, 0, *(None for _ in range(body.co_argcount - 3))) == handled(5)


def test_what_is_live():
    def fn(a, b):
        c = a + b
        d = c * 2
        return d

    c = decode(fn.__code__)
    live = assemble.live(fn.__code__)
    at = next(i.index for i in c.instrs if i.name == "STORE_FAST")
    assert live[at] == frozenset() and live[at + 1] == {2}
