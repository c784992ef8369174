"""Elementary functions as Triton text: the templates of emit/math.py, which are written in a small part of C, translated statement by
statement; what the device has itself is named in NATIVE.

In: (function, float type). Out: the text of `@triton.jit` functions, those that it calls first. Functions that Triton's interpreter lacks
are not used, so that every text runs there too.
"""

from __future__ import annotations

import re
from functools import cache

from .math import MATH

T = {"f32": "tl.float32", "f64": "tl.float64"}
BITS = {"f32": ("tl.int32", 31, 0x7FFFFFFF, 23), "f64": ("tl.int64", 63, 0x7FFFFFFFFFFFFFFF, 52)}

# function -> text of a call; {0} is the operand, on float32 and float64 alike
NATIVE: dict[str, str] = {
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "log": "tl.log({0})", "log2": "tl.log2({0})", "exp2": "tl.exp2({0})", "erf": "tl.erf({0})",
    "rsqrt": "tl.rsqrt({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "abs": "tl.abs({0})", "fma": "tl.fma({0}, {1}, {2})",
}  # fmt: skip
NATIVE64 = {"exp": "tl.exp({0})", "sqrt": "tl.sqrt({0})"}
# gelu: eager's formula there; what emit/math.py has for processors takes 86 instructions, more time than memory needs, this one 36
NATIVE32 = {"sqrt": "tl.sqrt_rn({0})", "gelu": "({0} * 0.5 * (1.0 + tl.erf({0} * 0.7071067811865476)))"}
# where 11 bits of a result are kept, the bare instruction is exact enough
FAST32 = {"exp": "tl.exp({0})", "sigmoid": "(1.0 / (1.0 + tl.exp(-{0})))"}
# whole turns are taken away, and what is near 0 is its own sine: the device's approximation is exact to 2^-21 absolutely
APPROXIMATE = """(x):
  n = tl.fma(x, 0.15915494309189535, 12582912.0) - 12582912.0
  r = tl.fma(n, -6.28125, x)
  r = tl.fma(n, -0.0019353071795864769, r)
  s = tl.inline_asm_elementwise("{name}.approx.f32 $0, $1;", "=f,f", [r], dtype=tl.float32, is_pure=True, pack=1)
  return {result}"""
# half erfc(|x| / sqrt 2) exp(x x / 2) as a polynomial in t = 1 / (1 + p |x| / sqrt 2), to 2^-14 of itself; own fit
GELU16 = """(x):
  t = 1.0 / tl.fma(tl.abs(x), 0.23164188861846924, 1.0)
  c = tl.fma(tl.fma(tl.fma(tl.fma(0.9499571919441223, t, -1.1110382080078125), t, 1.0327147245407104), t, -0.09076355397701263), t, 0.2190755307674408)
  c = c * t * tl.exp(x * x * -0.5) * 0.5
  m = tl.where(x < 8.0, x, 8.0)
  return tl.where(x > 0, x - m * c, x * c)"""
TANH16 = """(x):
  return tl.where(tl.abs(x) < 0.06, x * tl.fma(x * x, -0.3333333, 1.0), 1.0 - 2.0 / (1.0 + tl.exp(x + x)))"""
SHORTER = {
    "gelu": GELU16, "tanh": TANH16,
    "sin": APPROXIMATE.format(name="sin", result="tl.where(tl.abs(x) < 0.03, x, s)"),
    "cos": APPROXIMATE.format(name="cos", result="s"),
}  # of 16-bit numbers, for 16-bit results
BOUNDED = ("sin", "cos")  # for at most 65504


def _own(t: str) -> dict[str, str]:
    """What the templates take for granted."""
    i, top, most, n = BITS[t]
    least, magic = -(1 << top), 1.5 * 2.0**n
    return {
        "trunc": "(x):\n  return tl.where(x < 0, tl.ceil(x), tl.floor(x))",
        "copysign": f"(a, b):\n  s = b.to({i}, bitcast=True) & {least}\n  return ((a.to({i}, bitcast=True) & {most}) | s).to({T[t]}, bitcast=True)",
        "rint": f"(x):\n  y = copysign_{t}((tl.abs(x) + {magic!r}) - {magic!r}, x)\n  return tl.where(tl.abs(x) < {2.0**n!r}, y, x)",
        "mini": "(a, b):\n  return tl.where(a < b, a, b)",
        "maxi": "(a, b):\n  return tl.where(a > b, a, b)",
        "min": "(a, b):\n  return tl.where((a < b) | (a != a), a, b)",
        "max": "(a, b):\n  return tl.where((a > b) | (a != a), a, b)",
        "fmin": "(a, b):\n  return tl.where((a < b) | (b != b), a, b)",
        "fmax": "(a, b):\n  return tl.where((a > b) | (b != b), a, b)",
        "tan": "(x):\n  return tl.sin(x) / tl.cos(x)",
        "scalef": f"(a, b):\n  return scalefg_{t}(a, b)",
        "split": f"(x):\n  return splitg_{t}(x)",
        # of any x: far beyond the exponents in steps; those down leave room for a digit more, so that a denormal result is rounded once
        "ldexp": LDEXP.format(T=T[t], i=i, n=n, most=(1 << (top - n - 1)) - 1, up=2.0 ** ((1 << (top - n - 1)) - 1),
                              less=(1 << (top - n - 1)) - 3 - n, down=2.0 ** (3 + n - (1 << (top - n - 1)))),
        # exact: multiples of y are taken away from the top, 2^k y at a time
        "frem": FREM.format(T=T[t], steps=2100 if t == "f64" else 280, big=1023 if t == "f64" else 127),
        "remainder": f"(x, y):\n  r = frem_{t}(x, y)\n  return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)",
        "nextafter": f"""(a, b):
  i = a.to({i}, bitcast=True)
  up = (b > a) == (a > 0)
  s = tl.where(up, i + 1, i - 1)
  z = tl.where(b > 0, 1, {least + 1}).to({i})
  r = tl.where(a == 0, z, s).to({T[t]}, bitcast=True)
  return tl.where((a != a) | (b != b), a + b, tl.where(a == b, b, r))""",
    }


LDEXP = """(x, k):
  x = tl.where(k > {most}, x * {up!r}, x)
  k = tl.where(k > {most}, k - {most}, k)
  x = tl.where(k > {most}, x * {up!r}, x)
  k = tl.where(k > {most}, k - {most}, k)
  k = tl.where(k > {most}, {most}, k)
  x = tl.where(k < -{less}, x * {down!r}, x)
  k = tl.where(k < -{less}, k + {less}, k)
  x = tl.where(k < -{less}, x * {down!r}, x)
  k = tl.where(k < -{less}, k + {less}, k)
  k = tl.where(k < -{less}, -{less}, k)
  return x * ((k.to({i}) + {most}) << {n}).to({T}, bitcast=True)"""

# |x| mod |y|: r = |x|; while r >= y: take y 2^k away, k from the difference of the exponents; few steps in all but odd cases
FREM = """(x, y):
  a = tl.abs(x)
  m = tl.abs(y)
  bad = (m == 0) | (a != a) | (m != m) | (a == float("inf"))
  go = (a >= m) & (bad == 0) & (m != float("inf"))
  r = tl.where(go, a, 0.0)
  while tl.max(go.to(tl.int32) + tl.zeros([1], tl.int32)) > 0:
    q = tl.floor(tl.log2(r) - tl.log2(m))
    q = tl.where(q > {big}.0, {big}.0, tl.where(q > 0, q, 0.0))
    s = m * tl.exp2(q)
    s = tl.where(s > r, s * 0.5, s)
    s = tl.where(s < m, m, s)
    r = tl.where(go, r - s, r)
    go = go & (r >= m)
  r = tl.where((a >= m) & (m != float("inf")), r, a)
  r = tl.where(bad, float("nan"), r).to({T})
  return tl.where(x < 0, -r, r)"""

CALL = re.compile(r"\b([a-z]\w*)_(f32|f64)\(")


@cache
def functions(name: str, t: str) -> tuple[tuple[str, str], ...]:
    """(name in the text, text) of the function and all it calls, in order of definition."""
    own = _own(t).get(name)
    if own is not None:
        text = f"@triton.jit\ndef {name}_{t}{own}\n"
    else:
        text = _translate(name, t)
    out: dict[str, str] = {}
    for called, of in CALL.findall(text):
        if (called, of) != (name, t):
            out.update(functions(called, of))
    out[f"{name}_{t}"] = text
    return tuple(out.items())


def is_known(name: str, t: str) -> bool:
    return name in _own(t) or (name, t) in MATH


def call(
    name: str, t: str, args: tuple[str, ...], fast: bool = False, small: str = ""
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(text of the call, functions it needs). fast, small: see triton_ops.spell."""
    table = (NATIVE | NATIVE64) if t == "f64" else (NATIVE | NATIVE32 | FAST32) if fast else (NATIVE | NATIVE32)
    if t == "f32" and name in SHORTER and small in (("f16",) if name in BOUNDED else ("f16", "bf16")):
        return f"{name}_fast({', '.join(args)})", ((f"{name}_fast", f"@triton.jit\ndef {name}_fast{SHORTER[name]}\n"),)
    native = table.get(name)
    if native is not None:
        return native.format(*args), ()
    return f"{name}_{t}({', '.join(args)})", functions(name, t)


# ---------------------------------------------------------------- the translation


def _constant(text: str, t: str) -> str:
    value = _number(text)
    return f"tl.full([], {value}, tl.float64)" if t == "f64" else value


def _number(text: str) -> str:
    """A C number, or a quotient of such, as Python writes it."""
    if "/" in text:
        a, b = text.split("/")
        return f"({_number(a)} / {_number(b)})"
    text = text.strip()
    if "0x" in text and ("p" in text or "." in text):
        return repr(float.fromhex(text))
    return text


def _group(text: str, at: int) -> int:
    """The position behind the bracket that closes the one at `at`."""
    depth, pairs = 0, {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}
    for k in range(at, len(text)):
        depth += pairs.get(text[k], 0)
        if depth == 0:
            return k + 1
    raise ValueError(f"unbalanced: {text}")


def _apart(text: str, sign: str) -> list[str]:
    """`text` cut at `sign` where it stands in no bracket."""
    parts, depth, start = [], 0, 0
    for k, c in enumerate(text):
        depth += c in "([{"
        depth -= c in ")]}"
        if depth == 0 and c == sign:
            parts.append(text[start:k])
            start = k + 1
    return [*parts, text[start:]]


def _expression(text: str, t: str) -> str:
    """Names of primitives, constants, casts; `c ? a : b`."""
    i = BITS[t][0]
    text = re.sub(r"__builtin_inff?\(\)", 'float("inf")' if t == "f32" else 'tl.full([], float("inf"), tl.float64)', text)
    text = re.sub(r'__builtin_nanf?\(""\)', 'float("nan")', text)
    text = re.sub(r"\(FLT\)\{0\}|\(INT\)\{0\}", "0.0" if t == "f32" else "tl.full([], 0.0, tl.float64)", text)
    while (found := re.search(r"\bK\(", text)) is not None:
        end = _group(text, found.end() - 1)
        text = text[: found.start()] + _constant(text[found.end() : end - 1], t) + text[end:]
    bits = {"f32": (0x7FFFFFFF, 0x3F800000, -0x40800000), "f64": (0x7FFFFFFFFFFFFFFF, 0x3FF0000000000000, -0x4010000000000000)}[t]
    for word, value in (("KMAX", bits[0]), ("KMONE", bits[2]), ("KONE", bits[1])):
        text = text.replace(word, str(value))
    text = re.sub(r"\b(0x[0-9a-f]+|\d+)u?ll\b", r"\1", text)
    text = re.sub(r"\b(0x[0-9a-f]+)u\b", r"\1", text)
    text = text.replace("(FLT)", "").replace("(f64)", "").replace("(INT)", "").replace("(int)", "")
    for name, form in (("sel[@%]", "tl.where({0})"), ("not@", "(({0}) == 0)"), ("any%", "({0})"), ("asi@", f"({{0}}).to({i}, bitcast=True)"),
                       ("asf@", f"({{0}}).to({T[t]}, bitcast=True)"), ("toi@", f"({{0}}).to({i})"), ("tof@", f"({{0}}).to({T[t]})"),
                       ("tod@", "({0}).to(tl.float64)"), ("tos@", "({0}).to(tl.float32)")):  # fmt: skip
        while (found := re.search(rf"\b{name}\(", text)) is not None:
            end = _group(text, found.end() - 1)
            text = text[: found.start()] + form.replace("{0}", text[found.end() : end - 1]) + text[end:]
    while (found := re.search(r"\b(\w+)([@$])\(", text)) is not None:
        end, of = _group(text, found.end() - 1), "f64" if found.group(2) == "$" else t
        args = tuple(a.strip() for a in _apart(text[found.end() : end - 1], ","))
        made = call(found.group(1), of, args)[0]
        text = text[: found.start()] + made + text[end:]
    text = re.sub(r"(?<![\w.)])(?:0\.0|tl\.full\(\[\], 0\.0, tl\.float64\)) \+ (?=[\w-])", "", text)  # 0 + c
    return _choices(text).strip()


def _choices(text: str) -> str:
    """c ? a : b -> (a if c else b), in every bracket."""
    out, k = "", 0
    while k < len(text):
        if text[k] == "(":
            end = _group(text, k)
            out += "(" + ", ".join(_choices(p).strip() for p in _apart(text[k + 1 : end - 1], ",")) + ")"
            k = end
        else:
            out += text[k]
            k += 1
    parts = _apart(out, "?")
    if len(parts) == 1:
        return out
    a, b = _apart("?".join(parts[1:]), ":")[0], ":".join(_apart("?".join(parts[1:]), ":")[1:])
    return f"({a.strip()} if {parts[0].strip()} else {b.strip()})"


TYPES = re.compile(r"^(?:const )?(?:FLT|INT|UNS|MSK|f64|int)\s+")


def _translate(name: str, t: str) -> str:
    if (name, t) not in MATH:
        raise KeyError(f"{name} on {t}")
    text = re.sub(r"/\*.*?\*/", "", MATH[name, t], flags=re.S).strip()
    text = re.sub(r"\btl\b", "low", text)  # the language's own name
    text = re.sub(r"K\(0x1p(?:127|1023)\) \* K\(2\.0\)", "__builtin_inf()", text)
    head = text.index("(")
    end = _group(text, head)
    params = [p.strip() for p in text[head + 1 : end - 1].split(",")]
    outs = [p.split("*")[1].strip() for p in params if "*" in p]
    names = [p.split()[-1] + (": tl.constexpr" if p.split()[0] in ("f64", "int") and "FLT" not in p else "") for p in params if "*" not in p]
    body = text[text.index("{", end) + 1 : -1]
    lines = _statements(body, t, outs)
    return f"@triton.jit\ndef {name}_{t}({', '.join(names)}):\n" + "\n".join("  " + x for x in lines) + "\n"


def _statements(body: str, t: str, outs: list[str]) -> list[str]:
    lines: list[str] = []
    k = 0
    while True:
        while k < len(body) and body[k] in " \n;":
            k += 1
        if k >= len(body):
            return lines
        rest = body[k:]
        if rest.startswith("if "):
            close = _group(body, body.index("(", k))
            start = close + len(body[close:]) - len(body[close:].lstrip())
            if body[start] == "{":
                end = _group(body, start)
                lines += _statements(body[start + 1 : end - 1], t, outs)
            else:
                end = body.index(";", start) + 1
                lines += _statements(body[start:end], t, outs)
            k = end
        elif rest.startswith("for "):
            close = _group(body, body.index("(", k))
            var, count = re.match(r"for \(int (\w+) = (\d+; \w+ < \d+)", rest).groups()  # type: ignore[union-attr]
            first, last = count.split(";")[0], count.split("<")[1].strip()
            start = body.index("{", close)
            end = _group(body, start)
            lines.append(f"for {var} in tl.static_range({first}, {last}):")
            lines += ["  " + x for x in _statements(body[start + 1 : end - 1], t, outs)]
            k = end
        else:
            end = len(body)
            depth = 0
            for j in range(k, len(body)):
                depth += body[j] in "({"
                depth -= body[j] in ")}"
                if body[j] == ";" and depth == 0:
                    end = j
                    break
            lines += _statement(body[k:end].strip(), t, outs)
            k = end + 1


def _statement(text: str, t: str, outs: list[str]) -> list[str]:
    if text.startswith("return "):
        value = _expression(text[len("return ") :], t)
        return [f"return {', '.join([value, *outs])}"]
    lines: list[str] = []
    pending = ""
    for part in _apart(TYPES.sub("", text), ","):
        part = part.strip()
        if part.startswith("*"):
            part = part[1:]
        name, sign, value = part.partition("=")
        if not sign or value.startswith("="):
            pending = f"{part.strip()}, "  # FLT e, m = split@(x, &e): the pointer's variable comes second
            continue
        name = name.strip()
        while (found := re.search(r"\((\w+) = ", value)) is not None:
            end = _group(value, found.start())
            lines.append(f"{found.group(1)} = {_expression(value[found.end() : end - 1], t)}")
            value = value[: found.start()] + found.group(1) + value[end:]
        taken = re.search(r", &(\w+)\)", value)
        if taken is not None:
            name, value = f"{name}, {taken.group(1)}", value.replace(f", &{taken.group(1)}", "")
        lines.append(f"{name} = {_expression(value, t)}")
        pending = ""
    del pending
    return lines
