# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Interprets the manuals' pseudocode, which ``tinygrad`` carries: what tests compare instructions with.

One lane (or one wave) at a time, with Python's integers and exact rational arithmetic. Only what functions of operands
need of the language is understood; anything else raises `CannotInterpret`.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

_TOKEN = re.compile(
    r"\s*(?:(?P<sized>\d+'(?:0x[\da-fA-F]+|\d+)U?)|(?P<cast>\d+'[UIFB])|(?P<real>\d+\.\d+F?)"
    r"|(?P<whole>0x[\da-fA-F]+|\d+)(?:ULL|LL|U|L)?|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/&|^~!<>=?:(){}\[\].,]))"
)
_LEVELS: list[dict[str, Callable[[Any, Any], Any]]] = [
    {"||": lambda a, b: a or b}, {"&&": lambda a, b: a and b}, {"|": operator.or_}, {"^": operator.xor},
    {"&": operator.and_}, {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"<<": operator.lshift, ">>": operator.rshift}, {"+": operator.add, "-": operator.sub}, {"*": operator.mul},
]  # fmt: skip


class CannotInterpret(Exception):
    """The pseudocode has something that is not interpreted here."""


def rounded(exact: Fraction, width: int) -> int:
    """The bits of the nearest float of 16, 32 or 64 bits, ties to even."""
    mantissa, smallest, top = {16: (10, -14, 15), 32: (23, -126, 127), 64: (52, -1022, 1023)}[width]
    sign, size = (1 << (width - 1) if exact < 0 else 0), abs(exact)
    if not size:
        return 0
    power = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, smallest)
    while size >= Fraction(2) ** (power + 1):
        power += 1
    units = round(size / Fraction(2) ** (power - mantissa))
    if units >= 2 ** (mantissa + 1):
        units, power = units // 2, power + 1
    if power > top:
        return sign | ((2 * top + 1) << mantissa)
    biased = power + top if units >= 2**mantissa else 0
    return sign | biased << mantissa | units & (2**mantissa - 1)


@dataclass(frozen=True)
class Value:
    """Bits with a type: ``u``, ``i``, ``f`` or ``b``."""

    bits: int
    width: int
    kind: str

    def number(self) -> Any:
        if self.kind == "f":
            code = {16: "e", 32: "f", 64: "d"}[self.width]
            return struct.unpack("<" + code, self.bits.to_bytes(self.width // 8, "little"))[0]
        if self.kind == "i" and self.bits >> (self.width - 1):
            return self.bits - (1 << self.width)
        return self.bits

    def part(self, high: int, low: int) -> Value:
        if high < low:
            text = format(self.part(low, high).bits, f"0{low - high + 1}b")
            return Value(int(text[::-1], 2), low - high + 1, "b")
        return Value(self.bits >> low & (1 << (high - low + 1)) - 1, high - low + 1, "b")

    def typed(self, kind: str, width: int) -> Value:
        if width > self.width and self.kind == "i":
            return Value(self.number() & (1 << width) - 1, width, kind)
        return Value(self.bits & (1 << width) - 1, width, kind)


@dataclass(frozen=True)
class SignedZero(Value):
    """+0.0 or -0.0, written with its sign: the pseudocode compares the sign, too."""


def widened_nan(value: Value, width: int) -> Value:
    """NaN of another width, with its sign, its quiet bit and the top of its payload."""
    fractions = {16: 10, 32: 23, 64: 52}
    shift = fractions[width] - fractions[value.width]
    fraction = value.bits & (1 << fractions[value.width]) - 1
    fraction = fraction << shift if shift >= 0 else fraction >> -shift | 1 << (fractions[width] - 1)
    exponents = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF << 52}
    return Value(value.bits >> (value.width - 1) << (width - 1) | exponents[width] | fraction, width, "f")


def made(number: Any, width: int, kind: str) -> Value:
    """A number as a value of a type."""
    if kind != "f":
        return Value(int(number) & (1 << width) - 1, width, kind)
    if isinstance(number, float) and not np.isfinite(number):
        top = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF << 52}[width]
        quiet = {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8 << 48}[width]
        return Value(quiet if np.isnan(number) else top | (number < 0) << (width - 1), width, "f")
    if number == 0 and isinstance(number, float):
        return Value(int(np.signbit(number)) << (width - 1), width, "f")
    return Value(rounded(Fraction(number), width), width, "f")


class Interpreter:
    """One lane's (or one wave's) execution of an instruction's pseudocode."""

    def __init__(self, code: dict[str, str], name: str, sources: list[int], scc: int = 0, carry: int = 0) -> None:
        self.code, self.written = code, dict[str, Value]()
        self.names: dict[str, Value] = {f"S{i}": Value(bits, 64, "b") for i, bits in enumerate(sources)}
        self.names |= {"SCC": Value(scc, 1, "u"), "VCC": Value(carry, 64, "u"), "laneId": Value(0, 32, "u")}
        self.names |= {"D0": Value(0, 64, "b"), "INF": Value(0x7FF << 52, 64, "f")}
        self.run(self.split(code[name]))

    @staticmethod
    def split(text: str) -> list[str]:
        plain = re.sub(r"//[^\n]*", "", text).replace("\n", " ")
        parts = re.sub(r"\b(then|else|do)\b", r"\1;", plain)
        parts = re.sub(r"\b(elsif|else|endif|endfor)\b", r";\1", parts)
        return [one.strip() for one in parts.split(";") if one.strip() and not one.strip().startswith("declare")]

    def run(self, lines: list[str]) -> None:
        place = 0
        while place < len(lines):
            line = lines[place]
            if line.startswith("if "):
                place = self._branch(lines, place)
                continue
            if line.startswith(("for ", "{")) or "lambda" in line:
                raise CannotInterpret(line)
            target, value = self._assignment(line)
            self._assign(target, value)
            place += 1

    def _branch(self, lines: list[str], place: int) -> int:
        """Run the part of an if that applies; returns where it ends."""
        depth, parts, conditions = 0, list[list[str]](), list[str]()
        for at in range(place, len(lines)):
            line = lines[at]
            if line.startswith("if "):
                depth += 1
            if depth == 1 and line.startswith(("if ", "elsif ")):
                conditions.append(line.split(" ", 1)[1].removesuffix("then"))
                parts.append([])
            elif depth == 1 and line == "else":
                conditions.append("1")
                parts.append([])
            elif line == "endif":
                depth -= 1
                if not depth:
                    break
                parts[-1].append(line)
            else:
                parts[-1].append(line)
        for condition, part in zip(conditions, parts):
            if self.evaluate(condition).number():
                self.run(part)
                break
        return at + 1

    def _assignment(self, line: str) -> tuple[str, Value]:
        found = re.match(r"(.*?[^<>=!])=(?!=)(.*)", line)
        if found is None:
            raise CannotInterpret(line)
        return found[1].strip(), self.evaluate(found[2])

    def _assign(self, target: str, value: Value) -> None:
        found = re.fullmatch(
            r"(D0|SCC|VCC|tmp|result|sign_out|temp)(\[.*\]|\.u64\[laneId\])?(?:\.([uifb])(\d+))?", target
        )
        if found is None:
            raise CannotInterpret(target)
        name, place = found[1], found[2]
        if found[3]:
            width, kind = int(found[4]), found[3]
            value = self._converted(value, kind, width)
        if place and "laneId" in place:
            value = Value(int(bool(value.number())), 1, "u")
        elif place:
            high, _, low = place.strip("[]").partition(":")
            top, bottom = int(high), int(low or high)
            mask = (1 << (top - bottom + 1)) - 1
            old = self.names.get(name, Value(0, 64, "b"))
            value = Value(old.bits & ~(mask << bottom) | (value.bits & mask) << bottom, old.width, "b")
        elif name == "SCC":
            value = Value(int(bool(value.number())), 1, "u")
        self.names[name] = self.written[name] = value

    @staticmethod
    def _converted(value: Value, kind: str, width: int) -> Value:
        if kind == "f" and value.kind == "f" and width != value.width:
            if np.isnan(value.number()):
                return widened_nan(value, width)
            return made(value.number(), width, "f")
        return value.typed(kind, width)

    def evaluate(self, text: str) -> Value:
        self.tokens = list(self._tokens(text))
        value = self._choice()
        if self.tokens:
            raise CannotInterpret(text)
        return value

    @staticmethod
    def _tokens(text: str) -> Iterator[tuple[str, str]]:
        place, text = 0, text.strip()
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise CannotInterpret(text[place:])
            place = found.end()
            assert found.lastgroup is not None
            yield found.lastgroup, found[found.lastgroup]

    def _next(self, *signs: str) -> str | None:
        if self.tokens and self.tokens[0][0] == "sign" and self.tokens[0][1] in signs:
            return self.tokens.pop(0)[1]
        return None

    def _expect(self, sign: str) -> None:
        if self._next(sign) is None:
            raise CannotInterpret(f"{sign} is missing before {self.tokens[:3]}")

    def _choice(self) -> Value:
        condition = self._level(0)
        if self._next("?") is None:
            return condition
        first = self._choice()
        self._expect(":")
        second = self._choice()
        return first if condition.number() else second

    def _level(self, level: int) -> Value:
        if level == len(_LEVELS):
            return self._unary()
        left = self._level(level + 1)
        while (sign := self._next(*_LEVELS[level])) is not None:
            left = self._binary(sign, _LEVELS[level][sign], left, self._level(level + 1))
        return left

    def _binary(self, sign: str, function: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
        if isinstance(right, SignedZero) and sign == "==":
            return Value(int(left.bits == right.bits), 1, "u")
        if sign in ("==", "!=", "<", ">", "<=", ">=", "&&", "||"):
            return Value(int(bool(function(left.number(), right.number()))), 1, "u")
        if "f" in (left.kind, right.kind):
            return self._float(sign, left, right)
        width = left.width if sign in ("<<", ">>") else max(left.width, right.width)
        kind = left.kind if sign in ("<<", ">>") else "i" if left.kind == right.kind == "i" else "u"
        return made(function(left.number(), right.number()), width, kind)

    @staticmethod
    def _float(sign: str, left: Value, right: Value) -> Value:
        a, b, width = left.number(), right.number(), max(left.width, right.width)
        if np.isnan(a) and np.isnan(b):
            raise CannotInterpret("which of two NaN is kept, with no number among them")
        for value in (left, right):
            if value.kind == "f" and np.isnan(value.number()):
                return Value(value.bits | {16: 1 << 9, 32: 1 << 22, 64: 1 << 51}[value.width], value.width, "f")
        with np.errstate(all="ignore"):
            plain = {"+": np.add, "-": np.subtract, "*": np.multiply}[sign](np.float64(a), np.float64(b))
        if not (np.isfinite(a) and np.isfinite(b)):
            return made(float(plain), width, "f")
        exact = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](Fraction(a), Fraction(b))
        return made(exact if exact else float(plain), width, "f")

    def _unary(self) -> Value:
        sign = self._next("-", "~", "!", "+")
        if sign is None:
            return self._postfix(self._primary())
        if sign in "+-" and self.tokens[0] == ("real", "0.0"):
            self.tokens.pop(0)
            return SignedZero(int(sign == "-") << 63, 64, "f")
        value = self._unary()
        if sign == "!":
            return Value(int(not value.number()), 1, "u")
        if sign == "~":
            return Value(~value.bits & (1 << value.width) - 1, value.width, value.kind)
        if sign == "-" and value.kind == "f":
            return Value(value.bits ^ 1 << (value.width - 1), value.width, "f")
        return made(-value.number(), value.width, "i") if sign == "-" else value

    def _postfix(self, value: Value) -> Value:
        while True:
            if self._next("."):
                found = re.fullmatch(r"([uifb])(\d+)", self.tokens.pop(0)[1])
                if found is None:
                    raise CannotInterpret("a field")
                value = value.typed(found[1], int(found[2]))
            elif self._next("["):
                high = self._choice().number()
                low = self._choice().number() if self._next(":") else high
                self._expect("]")
                value = value.part(high, low)
            else:
                return value

    def _primary(self) -> Value:
        if self._next("("):
            value = self._choice()
            self._expect(")")
            return value
        if self._next("{"):
            parts = self._list("}")
            bits = 0
            for part in parts:
                bits = bits << part.width | part.bits
            return Value(bits, sum(part.width for part in parts), "b")
        if not self.tokens:
            raise CannotInterpret("nothing")
        kind, text = self.tokens.pop(0)
        if kind == "sized":
            width, digits = text.rstrip("U").split("'")
            return Value(int(digits, 0), int(width), "u")
        if kind == "cast":
            self._expect("(")
            value = self._choice()
            self._expect(")")
            size, target = int(text[:-2]), text[-1].lower()
            if target == "f" and value.kind in "ui":
                return made(Fraction(value.number()), size, "f")
            return self._converted(value, target, size)
        if kind == "real":
            return made(Fraction(text.rstrip("F")), 32 if text.endswith("F") else 64, "f")
        if kind == "whole":
            return Value(int(text, 0), 64 if int(text, 0) >= 2**32 else 32, "i")
        if self._next("("):
            return self._call(text, self._list(")"))
        if text == "WAVE_MODE":
            self._expect(".")
            self.tokens.pop(0)
            return Value(1, 1, "u")
        if text not in self.names:
            raise CannotInterpret(text)
        return self.names[text]

    def _list(self, end: str) -> list[Value]:
        found = [self._choice()]
        while self._next(","):
            found.append(self._choice())
        self._expect(end)
        return found

    def _call(self, name: str, given: list[Value]) -> Value:
        first = given[0]
        if name.startswith("v_") and name.upper() in self.code:
            inner = Interpreter(self.code, name.upper(), [one.bits for one in given])
            return inner.written["D0"]
        if name == "isNAN":
            return Value(int(np.isnan(first.number())), 1, "u")
        if name == "isSignalNAN":
            # Of a fp32 number given as fp64: widening keeps the quiet bit at the top of the fraction.
            return Value(int(np.isnan(first.number()) and not first.bits >> 51 & 1), 1, "u")
        if name == "cvtToQuietNAN":
            return Value(first.bits | 1 << 51, 64, "f")
        if name == "abs" and first.kind == "f":
            return Value(first.bits & ~(1 << (first.width - 1)), first.width, "f")
        if name == "fma":
            a, b, c = (one.number() for one in given)
            if not np.isfinite([a, b, c]).all():
                raise CannotInterpret("a fused operation on no number")
            exact = Fraction(a) * Fraction(b) + Fraction(c)
            return made(exact if exact else float(a * b + c), first.width, "f")
        if name == "exponent":
            return Value(first.bits >> 23 & 0xFF, 32, "i")
        if name == "sign":
            return Value(first.bits >> (first.width - 1), 1, "u")
        if name == "signext":
            return Value(first.number() & 2**64 - 1, 64, "i") if first.kind == "i" else first
        if found := re.fullmatch(r"[ui](?:16|32)_to_f(16|32|64)", name):
            return made(Fraction(first.number()), int(found[1]), "f")
        if found := re.fullmatch(r"f(?:16|32|64)_to_f(16|32|64)", name):
            return self._converted(first, "f", int(found[1]))
        if name == "trunc" and np.isfinite(first.number()) and abs(first.number()) >= 1:
            return made(Fraction(int(first.number())), first.width, "f")
        raise CannotInterpret(name)


def manual() -> dict[str, str]:
    from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

    return {re.sub(r"_E(32|64)$", "", op.name): text for op, text in PCODE.items()}
