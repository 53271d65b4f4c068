"""The pseudo code in which AMD's ISA documents define instructions, interpreted.

Arithmetic is on Python integers and fractions: nothing here is shared with the executor.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

TOKEN = re.compile(
    r"\s*(?:(?P<cast>\d+'[UIFB])|(?P<number>\d+'0x[0-9a-f]+|\d+'\d+U?|0x[0-9a-fA-F]+(?:ULL|LL|U)?"
    r"|\d+\.\d+F?|\d+(?:ULL|LL|U)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign>\*\*|<<|>>|<=|>=|==|!=|<>|\+=|-="
    r"|&&|\|\||[-+*/%~!&|^<>?:=(){}\[\],.;]))"
)
#: format -> bits of the significand behind the point, bits of the exponent
FORMATS = {("f", 16): (10, 5), ("bf", 16): (7, 8), ("f", 32): (23, 8), ("f", 64): (52, 11),
           ("fp", 8): (3, 4)}  # fmt: skip
DENORMAL = object()


class Value(NamedTuple):
    """Bits, and how they are read: unsigned ("u"), signed ("i"), or a float ("f", "bf", "fp")."""

    bits: int
    width: int
    kind: str = "u"

    @property
    def number(self) -> Any:
        if self.kind in ("f", "bf", "fp"):
            return unpacked(self.bits, self.kind, self.width)
        is_negative = self.kind == "i" and self.bits >> self.width - 1
        return self.bits - (1 << self.width) if is_negative else self.bits

    def read_as(self, kind: str, width: int) -> Value:
        return Value(self.bits & (1 << width) - 1, width, kind)


def unpacked(bits: int, kind: str, width: int) -> float:
    fraction_bits, exponent_bits = FORMATS[kind, width]
    sign = -1.0 if bits >> width - 1 else 1.0
    exponent = bits >> fraction_bits & (1 << exponent_bits) - 1
    fraction = bits & (1 << fraction_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if kind == "fp":  # without infinities: it has numbers of the largest exponent
        if bits & 0x7F == 0x7F:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - fraction_bits)
    return sign * math.ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)


def packed(number: Fraction | float, kind: str, width: int) -> Value:
    """A number rounded to the nearest of a format, ties to even."""
    fraction_bits, exponent_bits = FORMATS[kind, width]
    top, bias = (1 << exponent_bits) - 1, (1 << exponent_bits - 1) - 1
    sign = 1 << width - 1 if math.copysign(1.0, number) < 0 else 0
    if isinstance(number, float) and not math.isfinite(number):
        quiet = 1 << fraction_bits - 1 if math.isnan(number) else 0
        return Value(sign | top << fraction_bits | quiet, width, kind)
    exact = abs(Fraction(number))
    if not exact:
        return Value(sign, width, kind)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= exact < Fraction(2) ** exponent
    exponent = max(exponent, 1 - bias)
    steps = round(exact / Fraction(2) ** (exponent - fraction_bits))  # Python rounds ties to even
    # a carry runs into the exponent, as does the leading bit of a number that is not subnormal
    bits = steps + (exponent + bias - 1 << fraction_bits)
    return Value(sign | min(bits, top << fraction_bits), width, kind)


def exact(operation: str, *given: float) -> Fraction | float:
    """An operation on floats without rounding; special operands as IEEE 754 says."""
    a, b = given[:2]
    if operation == "fma":
        product = exact("*", a, b)
        return exact("+", product, given[2])  # type: ignore[arg-type]
    if operation == "/" and b == 0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        return math.nan if a == 0 or math.isnan(a) else sign * math.inf
    whole: dict[str, Callable[[Any, Any], Any]] = {
        "+": lambda x, y: x + y, "-": lambda x, y: x - y,
        "*": lambda x, y: x * y, "/": lambda x, y: x / y,
    }  # fmt: skip
    is_finite = all(isinstance(x, Fraction) or math.isfinite(x) for x in (a, b))
    if is_finite:
        result = whole[operation](Fraction(a), Fraction(b))
        if result:
            return result
    return whole[operation](float(a), float(b))  # signs of zeros, infinities, NaNs


class Document:
    """Instructions by name.

    Args:
        texts: name -> pseudo code.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def run(self, name: str, registers: dict[str, Any]) -> dict[str, Any]:
        """Execute an instruction for one lane; changes and returns its registers."""
        run = _Run(self, registers)
        run.statements(tokens(self._texts[name]), ())
        return registers

    def call(self, name: str, *given: Value) -> Value:
        """The result of an instruction used as a function."""
        registers = {f"S{at}": value for at, value in enumerate(given)}
        result = self.run(name, {**registers, "D0": Value(0, 64), "WAVE_MODE": {"IEEE": ZERO}})
        kind = given[0].kind
        return result["D0"].read_as(kind, 32)

    def __contains__(self, name: str) -> bool:
        return name in self._texts


ZERO = Value(0, 1)


def tokens(text: str) -> list[tuple[str, str]]:
    text = re.sub(r"//[^\n]*", "", text)
    found, at = [], 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        assert match, text[at : at + 40]
        found.append((match.lastgroup, match[match.lastgroup]))  # type: ignore[index]
        at = match.end()
    return found  # type: ignore[return-value]


class _Break(Exception):
    pass


class _Return(Exception):
    pass


class _Run:
    """One execution. `at` is the place in `tokens`; what is skipped is parsed, not `is_live`."""

    LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "<>"), ("<", "<=", ">", ">="),
              ("<<", ">>"), ("+", "-"), ("*", "/", "%"))  # fmt: skip

    def __init__(self, document: Document, variables: dict[str, Any]) -> None:
        self.document, self.variables = document, variables
        self.tokens: list[tuple[str, str]] = []
        self.at, self.is_live = 0, True

    # -- statements

    def statements(self, given: list[tuple[str, str]], ends: tuple[str, ...]) -> None:
        """Execute until one of the words `ends`, or the end."""
        if given is not self.tokens:
            self.tokens, self.at = given, 0
        while self.at < len(self.tokens) and self.peek() not in ends:
            if self.peek() == ";":
                self.at += 1
            else:
                self.statement()

    def statement(self) -> None:
        word = self.peek()
        if word == "if":
            self.conditional()
        elif word == "for":
            self.loop()
        elif word == "declare":
            while self.peek() != ";":
                self.at += 1
        elif word == "break":
            self.at += 1
            if self.is_live:
                raise _Break
        elif word == "return":
            self.at += 1
            value = self.expression()
            if self.is_live:
                self.variables["return"] = value
                raise _Return
        elif self.tokens[self.at + 2][1] == "lambda":
            self.function()
        else:
            self.assignment()

    def conditional(self) -> None:
        outer, is_open = self.is_live, True
        while self.peek() in ("if", "elsif", "else"):
            is_else = self.take() == "else"
            self.is_live = outer and is_open
            holds = is_else or bool(self.expression().bits)
            if not is_else:
                self.take("then")
            self.is_live = outer and is_open and holds
            self.statements(self.tokens, ("elsif", "else", "endif"))
            is_open = is_open and not holds
        self.take("endif")
        self.is_live = outer

    def loop(self) -> None:
        self.take("for")
        name = self.take()
        self.take("in")
        first = self.binary(0)
        self.take(":")
        last = self.binary(0)
        self.take("do")
        body, outer = self.at, self.is_live
        for number in range(first.bits, last.bits + 1):
            self.at, self.variables[name] = body, Value(number, 32, "i")
            try:
                self.statements(self.tokens, ("endfor",))
            except _Break:
                break
        self.at, self.is_live = body, False
        self.statements(self.tokens, ("endfor",))
        self.take("endfor")
        self.is_live = outer

    def function(self) -> None:
        name = self.take()
        self.take("=")
        self.take("lambda")
        self.take("(")
        parameters = []
        while self.peek() != ")":
            parameters.append(self.take())
            if self.peek() == ",":
                self.take()
        self.take(")")
        self.take("(")
        begin, depth = self.at, 1
        while depth:
            depth += (self.peek() == "(") - (self.peek() == ")")
            self.at += 1
        body = self.tokens[begin : self.at - 1]

        def call(*given: Value) -> Value:
            run = _Run(self.document, dict(zip(parameters, given, strict=True)))
            with suppress(_Return):
                run.statements(body, ())
            result: Value = run.variables["return"]
            return result

        self.variables[name] = call

    def assignment(self) -> None:
        targets = []
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                targets.append(self.target())
                if self.peek() == ",":
                    self.take()
            self.take("}")
        else:
            targets.append(self.target())
        sign = self.take()
        value = self.expression()
        if not self.is_live:
            return
        if len(targets) > 1:
            bits = value.bits
            for write, _, width in reversed(targets):
                write(Value(bits & (1 << width) - 1, width))
                bits >>= width
            return
        (write, read, _) = targets[0]
        if sign != "=":
            value = arithmetic(sign[0], read(), value)
        write(value)

    def target(self) -> tuple[Callable[[Value], None], Callable[[], Value], int]:
        """How to write it, how to read it, and its width."""
        begin, name = self.at, self.take()
        low, width, kind = 0, 0, ""
        container: Any = self.variables
        key: Any = name
        while self.peek() in (".", "["):
            if self.take() == ".":
                kind, width = typed(self.take())
                continue
            first = self.binary(0).number
            last = first
            if self.peek() == ":":
                self.take()
                last = self.binary(0).number
            self.take("]")
            if not kind and isinstance(container.get(key) if self.is_live else 0, dict):
                container, key = container[key], first
            elif name == "in" and not kind:
                container, key = container.setdefault(key, {}), first
            else:
                low, width, kind = low + last, first - last + 1, "u"

        def read() -> Value:
            here, self.at = self.at, begin
            value: Value = self.postfix()
            self.at = here
            return value

        def write(value: Value) -> None:
            if not width:
                container[key] = value
                return
            before = container.get(key, Value(0, 64))
            bits = converted(value, kind, width).bits
            mask = (1 << width) - 1 << low
            total = max(before.width, low + width)
            container[key] = Value(before.bits & ~mask | bits << low, total, before.kind)

        return write, read, width

    # -- expressions

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        word = self.peek()
        assert not expected or word == expected, (word, expected)
        self.at += 1
        return word

    def expression(self) -> Any:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take()
        yes = self.expression()
        self.take(":")
        no = self.expression()
        return yes if condition.bits else no

    def binary(self, level: int) -> Any:
        if level == len(self.LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while self.peek() in self.LEVELS[level]:
            sign = self.take()
            right = self.binary(level + 1)
            left = arithmetic(sign, left, right) if self.is_live else ZERO
        return left

    def power(self) -> Any:
        base = self.unary()
        if self.peek() != "**":
            return base
        self.take()
        exponent = self.unary()
        return Exact(Fraction(base.number) ** exponent.number) if self.is_live else ZERO

    def unary(self) -> Any:
        sign = self.peek()
        if sign not in ("-", "+", "~", "!"):
            return self.postfix()
        self.take()
        value = self.unary()
        if not self.is_live or sign == "+":
            return value
        if sign == "~":
            return Value(value.bits ^ (1 << value.width) - 1, value.width, value.kind)
        if sign == "!":
            return Value(int(not value.bits), 1)
        if value.kind in ("f", "bf"):
            return Value(value.bits ^ 1 << value.width - 1, value.width, value.kind)
        return Value(-value.bits & (1 << value.width) - 1, value.width, "i")

    def postfix(self) -> Any:
        value = self.primary()
        while self.peek() in (".", "["):
            if self.take() == ".":
                word = self.take()
                if isinstance(value, dict):
                    value = value[word]
                elif value is not DENORMAL:
                    kind, width = typed(word)
                    value = (
                        converted(value, kind, width)
                        if value.kind == "f"
                        else value.read_as(kind, width)
                    )
                continue
            first = self.binary(0)
            last = None
            if self.peek() == ":":
                self.take()
                last = self.binary(0)
            self.take("]")
            if not self.is_live:
                value = ZERO
            elif isinstance(value, dict):
                value = value[first.number]
            elif last is None:
                value = Value(value.bits >> first.number & 1, 1)
            elif first.number < last.number:  # in the opposite order
                width = last.number - first.number + 1
                bits = value.bits >> first.number & (1 << width) - 1
                value = Value(int(f"{bits:0{width}b}"[::-1], 2), width)
            else:
                width = first.number - last.number + 1
                value = Value(value.bits >> last.number & (1 << width) - 1, width)
        return value

    def primary(self) -> Any:
        kind, word = self.tokens[self.at]
        self.at += 1
        if kind == "cast":
            width, letter = word.split("'")
            value = self.primary()
            letter = "u" if letter == "B" else letter.lower()
            return converted(value, letter, int(width)) if self.is_live else ZERO
        if kind == "number":
            return literal(word)
        if word == "(":
            value = self.expression()
            self.take(")")
            return value
        if word == "{":
            bits, width = 0, 0
            while True:
                part = self.expression()
                bits, width = bits << part.width | part.bits, width + part.width
                if self.take() == "}":
                    return Value(bits, width)
        if self.peek() == "(":
            return self.call(word)
        if word in CONSTANTS:
            return CONSTANTS[word]
        return self.variables.get(word, ZERO) if not self.is_live else self.variables[word]

    def call(self, name: str) -> Any:
        self.take("(")
        given = []
        while self.peek() != ")":
            given.append(self.expression())
            if self.peek() == ",":
                self.take()
        self.take(")")
        if not self.is_live:
            return ZERO
        if name in FUNCTIONS:
            return FUNCTIONS[name](*given)
        if name in self.variables:
            return self.variables[name](*given)
        return self.document.call(name, *given)


class Exact(NamedTuple):
    """A number that has not been rounded yet."""

    number: Fraction
    kind: str = "f"
    width: int = 32


def typed(word: str) -> tuple[str, int]:
    """A type such as ``u32``: kind and width."""
    found = re.fullmatch(r"(bf|fp|[uifb])(\d+)", word)
    assert found, word
    return ("u" if found[1] == "b" else found[1]), int(found[2])


def literal(word: str) -> Value:
    if "'" in word:
        width, digits = word.split("'")
        return Value(int(digits.removesuffix("U"), 0), int(width))
    if "." in word:
        return packed(float(word.removesuffix("F")), "f", 32 if word.endswith("F") else 64)
    digits = word.rstrip("UL")
    width = 64 if word.endswith("LL") else 32
    kind = "u" if "U" in word or digits.startswith("0x") else "i"
    return Value(int(digits, 0), width, kind)


def converted(value: Any, kind: str, width: int) -> Value:
    """A value of another type: floats are rounded, integers are cut or extended."""
    if kind in ("f", "bf", "fp") and value.kind in ("f", "bf", "fp"):
        if isinstance(value, Value) and (value.kind, value.width) == (kind, width):
            return value
        return packed(value.number, kind, width)
    if value.kind == "i" and kind in ("u", "i"):
        return Value(value.number & (1 << width) - 1, width, kind)
    return value.read_as(kind, width)


def arithmetic(sign: str, a: Any, b: Any) -> Value:
    if b is DENORMAL:
        fraction_bits, _ = FORMATS["f", a.width]
        is_tiny = a.bits >> fraction_bits & (1 << a.width - 1 - fraction_bits) - 1 == 0
        return Value(int(is_tiny and bool(a.bits << 1 & (1 << a.width) - 1)), 1)
    if sign in COMPARISONS:
        return Value(int(COMPARISONS[sign](a.number, b.number)), 1)
    if sign in ("&&", "||"):
        both = (a.bits and b.bits) if sign == "&&" else (a.bits or b.bits)
        return Value(int(bool(both)), 1)
    if a.kind == "f":
        return packed(exact(sign, a.number, b.number), "f", a.width)
    width = max(a.width, b.width)
    if sign in ("<<", ">>"):
        width = a.width
    kind = a.kind if sign in ("<<", ">>") else "i" if "i" in (a.kind, b.kind) else "u"
    result = INTEGERS[sign](a.number, b.number)
    return Value(result & (1 << width) - 1, width, kind)


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<>": lambda a, b: a < b or a > b,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
INTEGERS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": lambda a, b: a // b, "%": lambda a, b: a % b, "&": lambda a, b: a & b,
    "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b,
}  # fmt: skip


def _float(width: int = 32, kind: str = "f") -> Callable[[Value], Value]:
    return lambda a: packed(a.number, kind, width)


def _from_integer(a: Value) -> Value:
    return packed(Fraction(a.number), "f", 32)


def _to_integer(kind: str) -> Callable[[Value], Value]:
    low, high = (0, (1 << 32) - 1) if kind == "u" else (-(1 << 31), (1 << 31) - 1)

    def convert(a: Value) -> Value:
        number = a.number
        if math.isnan(number):
            return Value(0, 32, kind)
        whole = (high if number > 0 else low) if math.isinf(number) else math.trunc(number)
        return Value(min(max(whole, low), high) & (1 << 32) - 1, 32, kind)

    return convert


def _whole(function: Callable[[float], int]) -> Callable[[Value], Value]:
    def apply(a: Value) -> Value:
        number = a.number
        is_whole = math.isfinite(number)
        return packed(math.copysign(function(number), number) if is_whole else number, "f", a.width)

    return apply


def _of_float(function: Callable[[float], float]) -> Callable[[Value], Value]:
    def apply(a: Value) -> Value:
        try:
            return packed(function(a.number), "f", 32)
        except ValueError:
            return CONSTANTS["NAN"]
        except OverflowError:
            return CONSTANTS["INF"]

    return apply


def _to_fp8(a: Value, *_: Value) -> Value:
    """What is too large is NaN, with its sign; of scales, all are 1."""
    sign, number = a.bits >> a.width - 1 << 7, abs(a.number)
    if math.isnan(number) or number >= 464:  # halfway from the largest to what would be the next
        return Value(sign | 0x7F if number != 464 else sign | 0x7E, 8, "fp")
    return Value(sign | packed(Fraction(number), "fp", 8).bits, 8, "fp")


def _of_fp8(kind: str, width: int) -> Callable[..., Value]:
    return lambda a, *_: packed(a.number, kind, width)


def _sign_extended(a: Value, bit: Value) -> Value:
    width = bit.bits
    is_negative = width and a.bits >> width - 1 & 1
    extension = (1 << a.width) - (1 << width) if is_negative else 0
    return Value((a.bits | extension) & (1 << a.width) - 1, a.width, "i")


def _exponent(a: Value) -> Value:
    fraction_bits, exponent_bits = FORMATS["f", a.width]
    return Value(a.bits >> fraction_bits & (1 << exponent_bits) - 1, 32, "i")


def _log2(number: float) -> float:
    return -math.inf if number == 0 else math.log2(number)


CONSTANTS: dict[str, Any] = {
    "INF": packed(math.inf, "f", 32), "NAN": packed(math.nan, "f", 32), "DENORM": DENORMAL,
    "OVERFLOW_F32": packed(math.inf, "f", 32), "UNDERFLOW_F32": packed(0.0, "f", 32),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fma": lambda a, b, c: packed(exact("fma", a.number, b.number, c.number), "f", a.width),
    "sqrt": _of_float(math.sqrt), "log2": _of_float(_log2),
    "pow": lambda a, b: _of_float(lambda number: math.pow(a.number, number))(b),
    "trunc": _whole(math.trunc), "floor": _whole(math.floor),
    "rint": _whole(round),
    **{
        f"Calc{space}Addr": lambda address, *_: Value(address.bits, 64)
        for space in ("Ds", "Global", "Buffer")
    },
    "fract": lambda a: packed(exact("-", a.number, _whole(math.floor)(a).number), "f", a.width),
    "isEven": lambda a: Value(int(math.isfinite(a.number) and a.number % 2 == 0), 1),
    "abs": lambda a: Value(a.bits & (1 << a.width - 1) - 1, a.width, a.kind),
    "sign": lambda a: Value(a.bits >> a.width - 1, 1),
    "exponent": _exponent,
    "ldexp": lambda a, b: packed(exact("*", a.number, Fraction(2) ** b.number), "f", a.width),
    "isNAN": lambda a: Value(int(math.isnan(a.number)), 1),
    "isSignalNAN": lambda a: ZERO, "cvtToQuietNAN": lambda a: a,
    "signext": lambda a: Value(a.number & (1 << 64) - 1, 64, "i"),
    "signext_from_bit": _sign_extended,
    "u32_to_f32": _from_integer, "i32_to_f32": _from_integer,
    "f32_to_u32": _to_integer("u"), "f32_to_i32": _to_integer("i"),
    "f32_to_f64": _float(64), "f64_to_f32": _float(32),
    "f32_to_fp8": _to_fp8, "f32_to_fp8_scale": _to_fp8, "fp8_to_f32": _of_fp8("f", 32),
    "fp8_to_f16_scale": _of_fp8("f", 16), "fp8_to_bf16_scale": _of_fp8("bf", 16),
    "f32_to_f16": _float(16), "f16_to_f32": _float(32), "f32_to_bf16": _float(16, "bf"),
}  # fmt: skip


def float_bits(number: float) -> int:
    """The bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
