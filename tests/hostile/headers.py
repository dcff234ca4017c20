"""safetensors files whose header lies: one line for each defect."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from hostile.attacks import COMPARING, EVERY, PLAIN, Defect
from hostile.crafted import flipped, safetensors_file

import fastensor


def saved() -> bytes:
    file = io.BytesIO()
    fastensor.save(PLAIN, file, container="safetensors", metadata={"format": "pt"})
    return file.getvalue()


SOUND = saved()
LENGTH = struct.unpack("<Q", SOUND[:8])[0]
HEADER, BODY = SOUND[8 : 8 + LENGTH], SOUND[8 + LENGTH :]
KEY = "fastensor.crc32"
CHECKSUMS: str = json.loads(HEADER)["__metadata__"][KEY]
A = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
"""A tensor of one byte."""
EMPTY = {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}


def made(header: object, body: bytes = b"x", *, length: int | None = None) -> Callable[[bytes], bytes]:
    """A file of its own, whatever the sound one is."""
    return lambda sound: safetensors_file(header, body, length=length)


def single(*, body: bytes = b"x", **fields: Any) -> Callable[[bytes], bytes]:
    """One of a single tensor, ``A`` with other fields."""
    return made({"a": {**A, **fields}}, body)


def two(first: list[int], second: list[int], body: bytes) -> Callable[[bytes], bytes]:
    """One of two tensors at those offsets."""
    places = {"a": first, "b": second}
    return made({name: {**A, "shape": [at[1] - at[0]], "data_offsets": at} for name, at in places.items()}, body)


def of_text(header: bytes | str) -> Callable[[bytes], bytes]:
    """One with that text as its header."""
    return made(header if isinstance(header, bytes) else header.encode(), b"")


def with_length(value: int) -> Callable[[bytes], bytes]:
    return lambda sound: struct.pack("<Q", value) + sound[8:]


def with_header(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    """The sound file with a changed header, and the spaces in it that no other tool writes."""

    def edit(sound: bytes) -> bytes:
        content = json.loads(HEADER)
        change(content)
        return safetensors_file(as_we_write(content), BODY)

    return edit


def as_we_write(content: object) -> bytes:
    """A header with the spaces that no other tool writes."""
    return json.dumps(content, separators=(",", ":")).encode().replace(f'"{KEY}":'.encode(), f'"{KEY}":  '.encode())


def by_another_tool(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    """A file of another tool, which has copied our checksums with the rest of the metadata, and changed something."""

    def edit(sound: bytes) -> bytes:
        content = json.loads(HEADER)
        change(content)
        return safetensors_file(content, BODY)

    return edit


def with_checksums(change: Callable[[str], object]) -> Callable[[bytes], bytes]:
    """The sound file with another text for its checksums."""
    return with_header(lambda content: content["__metadata__"].update({KEY: change(content["__metadata__"][KEY])}))


def signed_again(change: Callable[[list[str]], object]) -> Callable[[bytes], bytes]:
    """The sound file with other checksums of its tensors, and the right one for the header that holds them."""

    def edit(sound: bytes) -> bytes:
        content = json.loads(HEADER)
        words = CHECKSUMS.split(" ")[1:]
        change(words)
        blank = " ".join(["0" * 8, *words])
        content["__metadata__"][KEY] = blank
        return signed(as_we_write(content), blank)

    return edit


def in_disguise(sound: bytes) -> bytes:
    """The sound file with an escape in the name of its checksums, and the right one for a header with that."""
    blank = f"{'0' * 8}{CHECKSUMS[8:]}"
    blanked = HEADER.replace(CHECKSUMS.encode(), blank.encode())
    return signed(blanked.replace(f'"{KEY}'.encode(), f'"\\u{ord(KEY[0]):04x}{KEY[1:]}'.encode()), blank)


def signed(header: bytes, blank: str) -> bytes:
    """The sound file with a header whose checksums are ``blank`` with its own in place of the zeros."""
    unsigned = safetensors_file(header)
    own = f"{zlib.crc32(unsigned):08x}"
    return unsigned.replace(blank.encode(), f"{own}{blank[8:]}".encode()) + BODY


NOTICING = (*COMPARING, "inspect")
DIGITS = "1" * 10_000
AT_8 = "the header at offset 8"
IN_THE_LENGTH = [
    Defect("zero", with_length(0), f"{AT_8} begins with b''"),
    Defect("one", with_length(1), f"{AT_8} is not sound JSON"),
    Defect("one less", with_length(LENGTH - 1), "has CRC32"),
    Defect("one more", with_length(LENGTH + 1), "not sound JSON"),
    Defect(
        "beyond the file", with_length(len(SOUND)), rf"length at offset 0 claims a header of {len(SOUND)} bytes, but"
    ),
    Defect("a byte beyond the file", with_length(len(SOUND) - 7), "length at offset 0 claims"),
    Defect("all of the file", with_length(len(SOUND) - 8), "not sound JSON"),
    Defect("more than 100 MB", with_length(100_000_001), "claims a header of 100000001 bytes.*at most 100000000"),
    Defect("negative", with_length((1 << 64) - 1), f"claims a header of {(1 << 64) - 1} bytes"),
    Defect("the lowest negative", with_length(1 << 63), f"claims a header of {1 << 63} bytes"),
    Defect("big endian", lambda sound: sound[7::-1] + sound[8:], "length at offset 0 claims"),
    Defect("half of it", lambda sound: sound[:4], "4 bytes at offset 0, too few"),
    Defect("nothing behind it", lambda sound: sound[:8], "length at offset 0 claims"),
]
IN_THE_JSON = [
    Defect("empty", of_text(""), f"{AT_8} begins with b''"),
    Defect("a list", of_text("[]"), r"begins with b'\['"),
    Defect("null", of_text("null"), "begins with b'n'"),
    Defect("a number", of_text("17"), "begins with b'1'"),
    Defect("a text", of_text('"{}"'), "begins with b'\"'"),
    Defect("a byte order mark", of_text("\ufeff{}"), r"begins with b'\\xef'"),
    Defect("a leading space", of_text(" {}"), "begins with b' '"),
    Defect("not closed", of_text("{"), "not sound JSON"),
    Defect("closed twice", of_text("{}}"), r"not sound JSON \(Extra data"),
    Defect("two objects", of_text("{}{}"), r"not sound JSON \(Extra data"),
    Defect("a comma too many", of_text('{"a":1,}'), "not sound JSON"),
    Defect("a comment", of_text("{}//"), "not sound JSON"),
    Defect("zeros behind it", of_text("{}\0\0"), "not sound JSON"),
    Defect("NaN", of_text('{"a":NaN}'), r"not sound JSON \(NaN is not JSON\)"),
    Defect("Infinity", of_text('{"a":Infinity}'), "Infinity is not JSON"),
    Defect("negative Infinity", of_text('{"a":-Infinity}'), "-Infinity is not JSON"),
    Defect("a number of 10,000 digits", of_text(f'{{"a":{DIGITS}}}'), "not sound JSON|digits"),
    Defect("a large exponent", of_text('{"a":1e400}'), "tensor 'a' in the header is described by inf"),
    Defect("not UTF-8", of_text(b'{"\xff":{}}'), "not sound JSON .*utf-8"),
    Defect("UTF-16", of_text("{}".encode("utf-16")), "begins with"),
    Defect("surrogates in UTF-8", of_text(b'{"\xed\xa0\x80":{}}'), "not sound JSON .*utf-8"),
    Defect("an overlong NUL", of_text(b'{"\xc0\x80":{}}'), "not sound JSON .*utf-8"),
    Defect("a lone surrogate as a name", of_text('{"\\ud800":{}}'), "a name holds a lone surrogate"),
    Defect(
        "a lone surrogate in metadata", of_text('{"__metadata__":{"\\ud800":"x"}}'), "a name holds a lone surrogate"
    ),
    Defect(
        "a lone surrogate as metadata", of_text('{"__metadata__":{"x":"\\ud800"}}'), "__metadata__ in the header maps"
    ),
    Defect("a control character", of_text('{"a\n":{}}'), "not sound JSON"),
    Defect("a bad escape", of_text('{"\\x":{}}'), "not sound JSON"),
    Defect("a form feed", of_text("{\f}"), "not sound JSON"),
    Defect("deep lists", of_text('{"a":' + "[" * 100_000), "not sound JSON .*recursion"),
    Defect("deep dicts", of_text('{"a":' * 100_000), "not sound JSON .*recursion"),
    Defect(
        "deep and closed", of_text('{"a":' + "[" * 500 + "]" * 500 + "}"), "tensor 'a' in the header is described by"
    ),
    Defect("duplicate names", made(f'{{"a":{json.dumps(A)},"a":{json.dumps(A)}}}'.encode()), "'a' occurs twice"),
    Defect("duplicate fields", of_text('{"a":{"dtype":"U8","dtype":"U8"}}'), "'dtype' occurs twice"),
    Defect("duplicate metadata", of_text('{"__metadata__":{"x":"1","x":"2"}}'), "'x' occurs twice"),
    Defect("two metadata", of_text('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' occurs twice"),
    Defect("duplicates in disguise", of_text('{"a":1,"\\u0061":1}'), "'a' occurs twice"),
    Defect("metadata that is null", made({"__metadata__": None}, b""), "__metadata__ in the header maps"),
    Defect("metadata that is a list", made({"__metadata__": []}, b""), "__metadata__ in the header maps"),
    Defect("metadata of numbers", made({"__metadata__": {"x": 1}}, b""), "__metadata__ in the header maps"),
    Defect("metadata of dicts", made({"__metadata__": {"x": {}}}, b""), "__metadata__ in the header maps"),
    Defect("metadata of nothing", made({"__metadata__": {"x": None}}, b""), "__metadata__ in the header maps"),
]
NOT_DESCRIBED = "tensor 'a' in the header is described by .*, expected dtype, shape and data_offsets"
NOT_IN_TORCH = "is of dtype F6_E2M3, which torch .* does not have|nothing in it is called"
IN_AN_ENTRY = [
    Defect("a number", made({"a": 1}), NOT_DESCRIBED),
    Defect("nothing", made({"a": None}), NOT_DESCRIBED),
    Defect("a list", made({"a": ["U8", [1], [0, 1]]}), NOT_DESCRIBED),
    Defect("empty", made({"a": {}}), NOT_DESCRIBED),
    Defect("without dtype", made({"a": {"shape": [1], "data_offsets": [0, 1]}}), NOT_DESCRIBED),
    Defect("without shape", made({"a": {"dtype": "U8", "data_offsets": [0, 1]}}), NOT_DESCRIBED),
    Defect("without offsets", made({"a": {"dtype": "U8", "shape": [1]}}), NOT_DESCRIBED),
    Defect("with something else", single(strides=[1]), NOT_DESCRIBED),
    Defect("a dtype that does not exist", single(dtype="F33"), "has dtype 'F33', which the format does not have"),
    Defect("a dtype in small letters", single(dtype="u8"), "has dtype 'u8'"),
    Defect("a dtype that is a number", single(dtype=8), "has dtype 8"),
    Defect("a dtype that is a list", single(dtype=["U8"]), r"has dtype \['U8'\]"),
    Defect("a dtype of a million letters", single(dtype="U" * 1_000_000), r"has dtype 'U{70,80}\.\.\., which"),
    Defect("a shape that is a number", single(shape=1), "has shape 1, which no tensor has"),
    Defect("a shape that is a text", single(shape="1"), "has shape '1'"),
    Defect("a shape that is a dict", single(shape={"0": 1}), "has shape {'0': 1}"),
    Defect("a negative size", single(shape=[-1]), r"has shape \[-1\]"),
    Defect("two negative sizes", single(shape=[-1, -1]), r"has shape \[-1, -1\]"),
    Defect("a size with a point", single(shape=[1.0]), r"has shape \[1.0\]"),
    Defect("a size that is true", single(shape=[True]), r"has shape \[True\]"),
    Defect("a size that is a text", single(shape=["1"]), r"has shape \['1'\]"),
    Defect("a size that is nothing", single(shape=[None]), r"has shape \[None\]"),
    Defect("a size of 2^63", single(shape=[1 << 63]), f"has shape .{1 << 63}"),
    Defect("a size of 2^63 and none", single(shape=[1 << 63, 0]), f"has shape .{1 << 63}"),
    Defect("a size of 2^64", single(shape=[1 << 64]), f"has shape .{1 << 64}"),
    Defect("a product of 2^64", single(shape=[1 << 32, 1 << 32], body=b""), "which no tensor has"),
    Defect("a product of 2^64 + 1", single(shape=[274177, 67280421310721]), "which no tensor has"),
    Defect(
        "a product that overflows, and a zero", single(shape=[1 << 62, 1 << 62, 0], body=b""), "which no tensor has"
    ),
    Defect("a product that overflows in bits", single(dtype="U64", shape=[1 << 61], body=b""), "takes .* room for 1"),
    Defect("a larger shape", single(shape=[2]), r"U8 of shape \[2\] takes 2 bytes, but its data_offsets \[0, 1\] have"),
    Defect("a smaller shape", single(shape=[0]), "takes 0 bytes, but"),
    Defect("a larger dtype", single(dtype="U16"), "takes 2 bytes, but"),
    Defect("a scalar of two bytes", single(shape=[], data_offsets=[0, 2], body=b"xx"), "takes 1 bytes, but"),
    Defect("odd halves of bytes", single(dtype="F4", shape=[3], data_offsets=[0, 1]), "takes 1.5 bytes"),
    Defect("an odd row of halves", single(dtype="F4", shape=[2, 1]), "the last size of F4 is even"),
    Defect("a scalar of half a byte", single(dtype="F4", shape=[]), "takes 0.5 bytes"),
    Defect(
        "a dtype that torch lacks",
        single(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3], body=b"xxx"),
        NOT_IN_TORCH,
        tuple(entry for entry in EVERY if entry != "verify"),
        may_be_unverified=True,
    ),
    Defect("offsets that are a number", single(data_offsets=1), r"has data_offsets 1, expected \[begin, end\]"),
    Defect("one offset", single(data_offsets=[0]), r"has data_offsets \[0\]"),
    Defect("three offsets", single(data_offsets=[0, 1, 1]), r"has data_offsets \[0, 1, 1\]"),
    Defect("a negative offset", single(data_offsets=[-1, 0]), r"has data_offsets \[-1, 0\]"),
    Defect("offsets the wrong way round", single(data_offsets=[1, 0]), r"has data_offsets \[1, 0\]"),
    Defect("offsets with points", single(data_offsets=[0.0, 1.0]), r"has data_offsets \[0.0, 1.0\]"),
    Defect("offsets that are true", single(data_offsets=[False, True]), r"has data_offsets \[False, True\]"),
    Defect("offsets of 2^64", single(data_offsets=[1 << 64, (1 << 64) + 1]), "has data_offsets"),
]
WRONG_END = "the header says that tensors take the bytes from \\d+ to \\d+, but there are those from \\d+ to \\d+"
IN_THE_PLACES = [
    Defect("beyond the file", single(data_offsets=[1, 2]), WRONG_END),
    Defect("far beyond the file", single(data_offsets=[1 << 62, (1 << 62) + 1]), WRONG_END),
    Defect("nothing there", single(body=b""), WRONG_END),
    Defect("a byte behind it", single(body=b"xx"), WRONG_END),
    Defect("bytes of no tensor", made({}, b"x"), WRONG_END),
    Defect("a gap at the start", single(data_offsets=[1, 2], body=b"xx"), WRONG_END),
    Defect("a gap", two([0, 1], [2, 3], b"xxx"), r"tensors 'a' and 'b' leave a gap at offset \d+"),
    Defect("an overlap", two([0, 2], [1, 3], b"xxx"), r"tensors 'a' and 'b' overlap at offset \d+"),
    Defect("the same place", two([0, 1], [0, 1], b"x"), "overlap"),
    Defect("one within another", two([0, 3], [1, 2], b"xxx"), "overlap"),
    Defect("an empty one within another", two([0, 2], [1, 1], b"xx"), "overlap"),
    Defect("cut off", lambda sound: sound[:-1], WRONG_END),
    Defect("something behind it", lambda sound: sound + b"\0", WRONG_END),
    Defect("itself behind it", lambda sound: sound * 2, WRONG_END),
]
MALFORMED = f"'{KEY}' in the header at offset 8 does not hold 4 CRC32s"
NOT_ITS_OWN = r"the header \(\d+ bytes at offset 0\) has CRC32 \w+, expected \w+"
IN_THE_CHECKSUMS = [
    Defect("none", with_checksums(lambda text: ""), MALFORMED, NOTICING),
    Defect("one too few", with_checksums(lambda text: text[9:]), MALFORMED, NOTICING),
    Defect("one too many", with_checksums(lambda text: f"{text} 00000000"), MALFORMED, NOTICING),
    Defect("a digit too few", with_checksums(lambda text: text[1:]), MALFORMED, NOTICING),
    Defect("capitals", with_checksums(lambda text: "ABCDEF12" + text[8:]), MALFORMED, NOTICING),
    Defect("no hex", with_checksums(lambda text: "g" + text[1:]), MALFORMED, NOTICING),
    Defect("a minus", with_checksums(lambda text: "-" + text[1:]), MALFORMED, NOTICING),
    Defect("an underscore", with_checksums(lambda text: text[:3] + "_" + text[4:]), MALFORMED, NOTICING),
    Defect("digits of another script", with_checksums(lambda text: "\u0661" * 8 + text[8:]), MALFORMED, NOTICING),
    Defect("two spaces", with_checksums(lambda text: text.replace(" ", "  ", 1)), MALFORMED, NOTICING),
    Defect("a space in front", with_checksums(lambda text: f" {text}"), MALFORMED, NOTICING),
    Defect("a line break at the end", with_checksums(lambda text: f"{text}\n"), MALFORMED, NOTICING),
    Defect("tabs", with_checksums(lambda text: text.replace(" ", "\t")), MALFORMED, NOTICING),
    Defect("zeros", with_checksums(lambda text: " ".join(["0" * 8] * 4)), NOT_ITS_OWN, NOTICING),
    Defect("another of the header", with_checksums(lambda text: "01234567" + text[8:]), NOT_ITS_OWN, NOTICING),
    Defect(
        "another of a tensor", with_checksums(lambda text: text[:9] + "01234567" + text[17:]), NOT_ITS_OWN, NOTICING
    ),
    Defect(
        "another of a tensor, signed",
        signed_again(lambda words: words.__setitem__(0, "01234567")),
        r"tensor '\w+' \(\d+ bytes at offset \d+\) has CRC32 \w+, expected 01234567",
        ("load", "open", "verify", "convert"),
    ),
    Defect("swapped, signed", signed_again(lambda words: words.reverse()), "has CRC32", COMPARING),
    Defect("of another name", with_header(lambda content: content.update(a=content.pop("w"))), NOT_ITS_OWN, NOTICING),
    Defect("of another dtype", with_header(lambda content: content["w"].update(dtype="F32")), NOT_ITS_OWN, NOTICING),
    Defect("of another shape", with_header(lambda content: content["w"].update(shape=[4, 3])), NOT_ITS_OWN, NOTICING),
    Defect(
        "of other metadata", with_header(lambda content: content["__metadata__"].update(x="y")), NOT_ITS_OWN, NOTICING
    ),
    Defect("spaces behind the header", lambda sound: padded(sound, b" " * 8), NOT_ITS_OWN, NOTICING),
    Defect("line breaks behind the header", lambda sound: padded(sound, b"\n" * 8), NOT_ITS_OWN, NOTICING),
    Defect("a key in disguise", in_disguise, NOT_ITS_OWN, (), may_be_unverified=True),
    Defect("a tab between", lambda sound: sound.replace(b'":  "', b'":\t "'), "", (), may_be_unverified=True),
    Defect("by another tool", by_another_tool(lambda content: None), "", (), may_be_unverified=True),
    Defect(
        "of other metadata, by another tool",
        by_another_tool(lambda content: content["__metadata__"].update(x="y")),
        "",
        (),
        may_be_unverified=True,
    ),
    Defect("a flipped bit in a tensor", lambda sound: flipped(sound, -8), "has CRC32", COMPARING),
]


def padded(sound: bytes, padding: bytes) -> bytes:
    return safetensors_file(HEADER + padding, BODY)
