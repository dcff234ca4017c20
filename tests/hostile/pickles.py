"""Pickles that are up to something, made by hand: in archives that are sound and whose checksums are right."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass

from hostile.crafted import (
    NO_HOOKS,
    REBUILD,
    built,
    call,
    dict_of,
    list_of,
    named,
    number,
    program,
    storage,
    tensor,
    text,
    tuple_of,
)

OURS = ("load_keys", "open", "inspect", "convert")
"""The entry points that read pickles without running them."""
LOADING = ("load", "load_keys")
"""Those that let torch rebuild what was read, which imports parts of itself when it needs them."""
LISTING = ("open", "inspect", "convert")
"""Those that put all that they find into words."""
READERS = ("load", *OURS)
"""All that look at what a pickle says; verify does not."""
ELSEWHERE = "nothing in it is called|expected a dict of tensors|only a dict from names to dense tensors"
"""What is said of any pickle that does not hold what was asked for: ``load_keys`` and ``convert`` ask for something."""


@dataclass(frozen=True)
class Hostile:
    """A pickle that is up to something."""

    name: str
    pickled: bytes
    message: str = ELSEWHERE
    """A pattern of what is said by any entry point that refuses it, unless that is ``ELSEWHERE``."""
    refused_by: tuple[str, ...] = ()
    """The entry points that have to refuse it."""
    entries: tuple[str, ...] = READERS
    """Those to attack."""
    most_nbytes: int = 0
    """The most memory that reading it may take; 0 for the usual amount."""


def holding(w: bytes) -> bytes:
    """A pickle of a state with one tensor."""
    return program(dict_of(plain=dict_of(w=w)))


CUT = "is damaged|refuses|cannot rebuild"
LONG, LONGER = 1 << 62, 1 << 100
NEEDS = r"tensor 'plain.w' needs \d+ bytes of record '0', which has 16|cannot rebuild|failed"
GEOMETRY = r"are not integers from 0 to 2\^63 - 1|cannot rebuild"
LARGE = "more than 2.63 - 1 elements|cannot rebuild"
GEOMETRIES = [
    Hostile("storage larger than its record", holding(tensor(storage(numel=400), size=(400,))), NEEDS, READERS),
    Hostile("storage smaller than its record", holding(tensor(storage(numel=2), size=(2,))), "cannot rebuild", LOADING),
    Hostile("negative numel", holding(tensor(storage(numel=-1))), "cannot rebuild", LOADING),
    Hostile("huge numel", holding(tensor(storage(numel=LONG), size=(LONG,))), NEEDS, READERS),
    Hostile("numel of 100 bits", holding(tensor(storage(numel=LONGER))), "cannot rebuild", LOADING),
    Hostile("one element too many", holding(tensor(size=(5,))), NEEDS, READERS),
    Hostile("one element too far", holding(tensor(offset=1)), NEEDS, READERS),
    Hostile("a step too far", holding(tensor(size=(2,), stride=(4,))), NEEDS, READERS),
    Hostile("negative offset", holding(tensor(offset=-1)), GEOMETRY, READERS),
    Hostile("huge offset", holding(tensor(offset=LONG)), NEEDS, READERS),
    Hostile("offset of 100 bits", holding(tensor(offset=LONGER)), GEOMETRY, READERS),
    Hostile("negative stride", holding(tensor(offset=3, stride=(-1,))), GEOMETRY, READERS),
    Hostile("huge stride", holding(tensor(stride=(LONG,))), NEEDS, READERS),
    Hostile("negative size", holding(tensor(size=(-4,))), GEOMETRY, READERS),
    Hostile("size of 63 bits", holding(tensor(size=((1 << 63) - 1,))), NEEDS, READERS),
    *(
        Hostile(f"product of 64 bits, {name}", holding(tensor(size=(1 << 32, 1 << 32), stride=stride)), LARGE, READERS)
        for name, stride in {"expanded": (0, 0), "overlapping": (1, 1)}.items()
    ),
    Hostile("expanded to 2^50", holding(tensor(size=(1 << 50,), stride=(0,))), "not contiguous", ("convert",)),
    Hostile("empty, of huge sizes", holding(tensor(offset=LONG, size=(0, LONG), stride=(LONG, LONG)))),
    Hostile("more sizes than strides", holding(tensor(size=(2, 2))), "more sizes than strides|cannot rebuild", READERS),
    Hostile(
        "more strides than sizes", holding(tensor(stride=(1, 1))), "more sizes than strides|cannot rebuild", READERS
    ),
    Hostile(
        "sizes that are texts",
        holding(call(REBUILD, storage(), number(0), text("ab"), text("cd"), b"\x89", NO_HOOKS)),
        GEOMETRY,
        READERS,
    ),
    Hostile(
        "sizes that are true",
        holding(call(REBUILD, storage(), number(0), tuple_of(b"\x88"), tuple_of(b"\x88"), b"\x89", NO_HOOKS)),
        GEOMETRY,
        READERS,
    ),
]
MISSING = "which has 0|failed|not the persistent id|damaged|cannot rebuild"
NO_STORAGE = "not the persistent id of a storage|is damaged|cannot rebuild|refuses|does not allow"
STORAGES = [
    Hostile("a key that is not there", holding(tensor(storage("7"))), MISSING, READERS),
    Hostile("a way to another record", holding(tensor(storage("../version"))), MISSING, READERS),
    Hostile("a way to the same record", holding(tensor(storage("../data/0"))), MISSING, READERS),
    Hostile("no key", holding(tensor(storage(""))), MISSING, READERS),
    Hostile("NUL in the key", holding(tensor(storage("7\0"))), MISSING, READERS),
    Hostile("a lone surrogate as a key", holding(tensor(storage("\ud800"))), MISSING, READERS),
    Hostile("no dtype", holding(tensor(storage(kind=named("torch", "float33")))), NO_STORAGE, READERS),
    Hostile("a dtype of no storage", holding(tensor(storage(kind=named("torch", "float32")))), NO_STORAGE, READERS),
    Hostile("a text as dtype", holding(tensor(storage(kind=text("float32")))), NO_STORAGE, READERS),
    Hostile("no storage", holding(tensor(storage(word="module"))), NO_STORAGE, READERS),
    Hostile("an id of four", holding(tensor(tuple_of(text("storage"), text("0")) + b"Q")), NO_STORAGE, READERS),
    Hostile("an id that is a number", holding(tensor(number(3) + b"Q")), NO_STORAGE, READERS),
    Hostile("an id that is nothing", holding(tensor(b"NQ")), NO_STORAGE, READERS),
    Hostile("an id that is empty", holding(tensor(b")Q")), NO_STORAGE, READERS),
    Hostile("an id in text", program(b"Pstorage\n"), NO_STORAGE, READERS),
    Hostile(
        "a list as key",
        holding(tensor(tuple_of(text("storage"), named("torch", "FloatStorage"), b"]", text("cpu"), b"K\4") + b"Q")),
        NO_STORAGE,
        READERS,
    ),
    Hostile(
        "a place that does not exist", holding(tensor(storage().replace(text("cpu"), text("ctu")))), "ctu", LOADING
    ),
]
ON_META = named("torch._utils", "_rebuild_meta_tensor_no_storage")
SPARSE = named("torch._utils", "_rebuild_sparse_tensor")
WRAPPER = named("torch._utils", "_rebuild_wrapper_subclass")
QUANTIZED = named("torch._utils", "_rebuild_qtensor")
FROM_TYPE = named("torch._tensor", "_rebuild_from_type_v2")
PARAMETER = named("torch._utils", "_rebuild_parameter")
PARTS = [
    Hostile(
        "no dtype on meta", holding(call(ON_META, text("x"), tuple_of(b"K\2"), tuple_of(b"K\1"), b"\x89")), CUT, READERS
    ),
    Hostile(
        "sizes that are texts on meta",
        holding(call(ON_META, named("torch", "float32"), tuple_of(text("a")), tuple_of(text("b")), b"\x89")),
        GEOMETRY,
        READERS,
    ),
    Hostile(
        "sparse without parts", holding(call(SPARSE, b"N", tuple_of())), "is damaged|cannot rebuild|refuses", READERS
    ),
    Hostile(
        "sparse, of itself",
        holding(call(SPARSE, b"N", tuple_of(tensor(), tensor(), call(named("torch", "Size"), tuple_of(number(4)))))),
        "cannot rebuild|more than its bytes",
        (*LOADING, "convert"),
    ),
    Hostile("a wrapper without dtype", holding(call(WRAPPER, b"N", b"N", tuple_of(number(4)))), CUT, READERS),
    Hostile(
        "quantized, of sizes that are texts",
        holding(call(QUANTIZED, storage(), number(0), text("abc"), b"N", b"N")),
        CUT,
        READERS,
    ),
    Hostile(
        "a type that is a number",
        holding(call(FROM_TYPE, number(3), number(3), tuple_of(), b"N")),
        "is damaged|cannot|refuses",
        READERS,
    ),
    Hostile("a parameter of a number", holding(call(PARAMETER, number(3), b"\x88", NO_HOOKS)), CUT, LOADING),
    Hostile(
        "a size of texts", program(call(named("torch", "Size"), tuple_of(text("a")))), "is damaged|cannot", READERS
    ),
    Hostile(
        "a device that does not exist",
        program(call(named("torch", "device"), text("teapot"))),
        "is damaged|cannot",
        READERS,
    ),
]


FORBIDDEN = "weights_only=True|not an allowed|damaged"


def running_code(marker: str) -> list[Hostile]:
    """Pickles that create a file when they are run."""
    command, code = text(f"touch {marker}"), text(f"open({marker!r}, 'w').close()")
    system = named("os", "system")
    pickles = {
        "os.system": program(call(system, command)),
        "posix.system": program(call(named("posix", "system"), command)),
        "subprocess": program(call(named("subprocess", "getoutput"), command)),
        "exec": program(call(named("builtins", "exec"), code)),
        "eval of Python 2": program(call(named("__builtin__", "eval"), code)),
        "open": program(call(named("io", "open"), text(marker), text("w"))),
        "as an instance": program(b"(" + command + b"ios\nsystem\n"),
        "as an object": program(b"(" + system + command + b"o"),
        "with its name on the stack": program(
            text("os") + text("system") + b"\x93" + tuple_of(command) + b"R", protocol=4
        ),
        "through a tensor's type": holding(call(FROM_TYPE, system, b"N", tuple_of(command), b"N")),
    }
    return [Hostile(name, pickled, FORBIDDEN, ("load",)) for name, pickled in pickles.items()]


CODE = [
    Hostile("a function as a class", program(named("os", "system") + tuple_of() + b"\x81"), FORBIDDEN, ("load",)),
    Hostile("a state", program(built(call(named("os", "_wrap_close")), tuple_of())), FORBIDDEN, ("load",)),
    Hostile("a module that is not imported", program(call(named("this", "s"))), FORBIDDEN, ("load",)),
    Hostile(
        "a lazy module of torch",
        program(dict_of(plain=dict_of(w=tensor()), x=named("torch", "onnx"))),
        FORBIDDEN,
        ("load",),
    ),
    Hostile("an extension", program(b"\x82\1"), "damaged|refuses", ("load", *OURS)),
]
BUILDING = [
    Hostile(
        "the defaults of a function",
        program(
            dict_of(
                plain=dict_of(w=tensor()),
                x=built(REBUILD, tuple_of(b"N", dict_of(__kwdefaults__=dict_of(dtype=named("torch", "int32"))))),
            )
        ),
        CUT,
        READERS,
    ),
    Hostile(
        "a method of a class",
        program(
            dict_of(
                plain=dict_of(w=tensor()),
                x=built(
                    named("collections", "Counter"),
                    tuple_of(b"N", dict_of(__repr__=named("collections", "OrderedDict"))),
                ),
            )
        ),
        CUT,
        READERS,
    ),
    Hostile(
        "the key of a storage",
        holding(tensor(built(storage(), list_of(b"]", named("torch", "float32"), b"N")))),
        CUT,
        READERS,
    ),
    Hostile("the dtype of a storage", holding(tensor(built(storage(), list_of(text("0"), b"N", b"N")))), CUT, READERS),
    Hostile(
        "the offset of a tensor",
        holding(
            built(
                tensor(size=(1,)),
                list_of(
                    text("T"),
                    named("torch", "float32"),
                    tuple_of(number(1)),
                    storage(),
                    number(-3),
                    tuple_of(number(1)),
                    b"\x88",
                    b")",
                ),
            )
        ),
        CUT,
        LOADING,
    ),
    Hostile(
        "a method of an instance",
        program(built(NO_HOOKS, dict_of(items=text("x"))) + b"(" + text("plain") + dict_of(w=tensor()) + b"u"),
    ),
    Hostile("a list", program(built(b"]", dict_of(a=b"N"))), "damaged|refuses|cannot", READERS),
    Hostile("a number", program(built(number(1), dict_of(a=b"N"))), "damaged|refuses|cannot", READERS),
    Hostile(
        "a class of ours", program(built(named("a", "b"), dict_of(a=b"N"))), "damaged|refuses|cannot|allow", READERS
    ),
    Hostile("nothing", program(b"N" + dict_of(a=b"N") + b"b"), "damaged|refuses|cannot", READERS),
]
DEEP = 30_000
HUGE = b"\x8b" + struct.pack("<L", 3000) + b"\x7f" * 3000
OPCODES = [
    Hostile("empty", b"", CUT, READERS),
    Hostile("no end", program(b"}")[:-1], CUT, READERS),
    Hostile("nothing on the stack", program(b""), CUT, READERS),
    Hostile("bytes behind its end", program(dict_of(plain=dict_of(w=tensor()))) + b"cos\nsystem\n"),
    Hostile("no mark", program(b"t"), CUT, READERS),
    Hostile("a far place in the memo", program(b"}r\xff\xff\xff\xff")),
    Hostile("an empty place in the memo", program(b"}h\7"), CUT, READERS),
    Hostile("a bytearray of 2^62", program(b"\x96" + struct.pack("<Q", LONG) + b"x", protocol=5), CUT, READERS),
    Hostile("a bytearray of 2^64", program(b"\x96" + b"\xff" * 8, protocol=5), CUT, READERS),
    Hostile("bytes of 2^62", program(b"\x8e" + struct.pack("<Q", LONG) + b"x", protocol=4), CUT, READERS),
    Hostile("bytes of 4 GiB", program(b"B" + b"\xff" * 4 + b"x", protocol=4), CUT, READERS),
    Hostile("text of 2^62", program(b"\x8d" + struct.pack("<Q", LONG) + b"x", protocol=4), CUT, READERS),
    Hostile("text of 4 GiB", program(b"X" + b"\xff" * 4 + b"x"), CUT, READERS),
    Hostile("a frame of 2^62", program(b"\x95" + struct.pack("<Q", LONG) + b"}", protocol=4), CUT, ("load",)),
    Hostile("an int of -1 bytes", program(b"\x8b\xff\xff\xff\xff"), CUT, READERS),
    Hostile("an int of 2 GiB", program(b"\x8b\xff\xff\xff\x7f"), CUT, READERS),
    Hostile("protocol 255", program(b"}", protocol=255), CUT, LISTING),
    Hostile("out of band", program(b"\x97", protocol=5), CUT, READERS),
    Hostile("an int of 7000 digits", program(dict_of(plain=dict_of(w=tensor()), x=HUGE)), CUT, LOADING),
    Hostile("a key of 7000 digits", program(b"}(" + text("plain") + dict_of(w=tensor()) + HUGE + b"Nu"), CUT, LOADING),
    Hostile("deep lists", program(b"]" * DEEP + b"a" * (DEEP - 1))),
    Hostile("deep tuples", program(b")" + b"\x85" * DEEP)),
    Hostile("deep dicts", program((b"}" + text("a")) * DEEP + b"N" + b"s" * DEEP)),
    Hostile(
        "deep calls",
        program(named("a", "b") + b"q\0" + b"h\0" * DEEP + b")" + b"\x85R" * DEEP),
        "does not allow",
        ("load",),
    ),
    Hostile("deep marks", program(b"(" * DEEP), CUT, READERS),
    *(
        Hostile(f"a key like {name}", program(b"}(" + text("plain") + dict_of(w=tensor()) + key + b"Nu"), CUT)
        for name, key in {
            "1": number(1),
            "None": b"N",
            "True": b"\x88",
            "nan": b"G\x7f\xf8" + bytes(6),
            "()": b")",
            "bytes": b"C\1x",
            "a surrogate": text("\ud800"),
            "a storage": storage(),
            "a class": named("torch", "float32"),
        }.items()
    ),
    Hostile("a list as a key", program(b"}]Ns"), CUT, READERS),
    Hostile(
        "1 and the text 1",
        program(b"}(K\1" + tensor() + text("1") + tensor() + b"u"),
    ),
    *(
        Hostile(f"protocol {number}", pickle.dumps({"plain": {"a": bytearray(b"x")}, "b": {1}}, number), CUT)
        for number in range(6)
    ),
]


def doubled(first: bytes, times: int, pair: bytes = b"\x86") -> bytes:
    """A pair of a pair of a pair: as many values as 2 to the power of ``times``, in a few bytes."""
    return first + b"q\0" + (b"h\0" + pair + b"q\0") * times


def repeated(value: bytes, times: int) -> bytes:
    """A list of one value, many times, and of something that makes it a branch."""
    return b"](]" + value + b"q\0" + b"h\0" * times + b"e"


def memoized(count: int, step: bytes, first: bytes) -> bytes:
    """``step`` again and again, each of its results kept."""
    return first + b"".join(step + b"q\1r" + struct.pack("<L", 2 + at) for at in range(count))


def put(place: int) -> bytes:
    return b"r" + struct.pack("<L", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<L", place)


def frozensets(depth: int, base: int) -> bytes:
    """Pairs of a = {a', b'} and b = {a', b', 0}, which are made of those before."""
    pairs = b"(K\1\x91" + put(base) + b"(K\2\x91" + put(base + 1)
    for at in range(base, base + 2 * depth, 2):
        both = b"(" + get(at) + get(at + 1)
        pairs += both + b"\x91" + put(at + 2) + both + b"K\0\x91" + put(at + 3)
    return pairs


EQUAL_FROZENSETS = b"](" + frozensets(40, 0) + frozensets(40, 500) + b"e0}" + get(80) + b"Ns" + get(580) + b"Ns"
LAUGHTER = doubled(b")", 60)
PARAMETERS = PARAMETER + b"q\0" + tensor() + b"q\1"
ROW = b"](" + b"K\0" * 20_000 + b"eq\1"
FLOATS = named("torch", "FloatStorage")
COUNTER = call(named("collections", "Counter"))
CLASS = named("a", "b") + b"q\0"
ORDERED = named("collections", "OrderedDict") + b"q\0"
PAIRS = b"(](" + b"".join(tuple_of(number(i), b"N") for i in range(5_000)) + b"etq\1"
NUMBERS = b"(](" + b"".join(number(i) for i in range(5_000)) + b"eq\2tq\1"
LATIN = tuple_of(text("x" * 200_000), text("latin1")) + b"q\1"
SETS, LISTED = named("builtins", "set") + b"q\0", named("torch", "Size") + b"q\0"
HEX = b"L0x" + b"f" * 400_000 + b"L\nq\0"
TEXTS = text("x" * 3_000_000) + b"q\0" + text("x" * 3_000_000) + b"q\1"
OF_ONE_HASH = b"".join(number(i * ((1 << 61) - 1)) + b"N" for i in range(60_000))
INTEGER = b"\x8b" + struct.pack("<L", 400_000) + b"\x7f" * 400_000 + b"q\0"
ZEROS = b"\x96" + struct.pack("<Q", 200_000) + bytes(200_000)
GLOBALS = b"q\0](" + b"".join(b"h\0" + text(str(at)) + b"\x93" for at in range(20_000)) + b"e"
OF_TYPE = tuple_of(named("builtins", "set"), named("a", "b"), NUMBERS, b"N") + b"q\1"
SIZES = REBUILD + b"q\2(h\0K\0h\1h\1tq\3"
ARGUMENTS = b"(" + b"K\0" * 20_000 + b"tq\1"
COPIED = "its calls copy more than the file holds"
MANY = "holds more than 1000000 values"
LAUGHING = [
    # A load does not take all of these well: torch's unpickler hangs, too.
    Hostile(name, program(pickled), f"{CUT}|{MANY}", entries=OURS)
    for name, pickled in {
        "2^60 values deep": LAUGHTER + b"\x85" * 200,
        "2^60 values in a set": call(named("builtins", "set"), LAUGHTER),
        "2^60 values as a key": b"}" + LAUGHTER + b"Ns",
        "2^60 values in a key": b"}" + call(named("a", "b"), LAUGHTER) + b"]s",
        "2^60 values as an id": tuple_of(text("x"), LAUGHTER, b"N", b"N", b"N") + b"Q",
        "2^60 values as a kind": call(WRAPPER, LAUGHTER, named("torch", "float32"), b")"),
        "2^60 values as a place": tuple_of(text("storage"), FLOATS, text("0"), LAUGHTER, b"N") + b"Q",
        "2^60 values as sizes": call(REBUILD, storage(), number(0), LAUGHTER, LAUGHTER),
        "2^60 values as an encoding": call(named("_codecs", "encode"), text("x"), LAUGHTER),
        "2^60 values in a leaf": dict_of(a=COUNTER + text("x") + LAUGHTER + b"s"),
        "frozensets that are equal": EQUAL_FROZENSETS,
        "a long text of many": repeated(text("s" * 400_000), 40_000),
    }.items()
]
BOMBS = [
    Hostile("2^60 values", program(LAUGHTER), MANY, OURS, entries=OURS, most_nbytes=160 << 20),
    Hostile(
        "a long name of many",
        program(dict_of(**{"k" * 20_000: b"](" + b"]" * 20_000 + b"e"})),
        MANY,
        OURS,
        entries=OURS,
        most_nbytes=128 << 20,
    ),
    Hostile(
        "one size as many keys",  # three bytes for each of 400,000 entries
        program(LISTED + ARGUMENTS + b"\x85R" + b"q\0}(" + b"h\0N" * 400_000 + b"u"),
        entries=OURS,
        most_nbytes=512 << 20,
    ),
    Hostile(
        "many classes",
        program(b"".join(b"c%x\n\n" % at for at in range(100_000))),
        entries=OURS,
        most_nbytes=48 << 20,
    ),
    *(
        Hostile(name, program(pickled), entries=OURS)
        for name, pickled in {
            "a long class of many": repeated(named("a", "k" * 250) + b")R", 20_000),
            "parameters of parameters": memoized(10_000, b"h\0h\1\x85R", PARAMETERS),
            "one tuple as arguments of many": CLASS + ARGUMENTS + b"h\0h\1R" * 4_000,
            "one tuple as arguments of many new objects": CLASS + ARGUMENTS + b"h\0h\1\x81" * 4_000,
            "one tuple as arguments of many calls": call(CLASS) + b"q\0" + ARGUMENTS + b"h\0h\1R" * 4_000,
            "states of states": tensor() + b"q\0" + b"h\0b" * 20_000,
            "sets": b"\x8f" * 600_000,
            "one integer as many keys": INTEGER + b"}(" + b"h\0N" * 100_000 + b"u",
            "one integer in text as many keys": HEX + b"}(" + b"h\0N" * 200_000 + b"u",
            "integers of one hash": b"}(" + OF_ONE_HASH + b"u",
            "one text as many keys": TEXTS + b"}h\0Ns(" + b"h\1N" * 400_000 + b"u",
            "one list of plain values, many times": ROW + b"](]" + b"h\1" * 100_000 + b"e",
            "one integer in many sets": INTEGER + b"\x8f(" + b"h\0" * 100_000 + b"\x90",
            "calls of calls": named("a", "b") + b"q\0)R" + b")R" * 100_000,
            "many calls of long names": memoized(20_000, b"h\0)R", call(named("a", "b" * 250)) + b"q\0"),
            "many calls of calls": memoized(20_000, b")R", named("a", "b")),
            "one name in many globals": text("k" * 250) + GLOBALS,
        }.items()
    ),
    *(
        # What we refuse, a load leaves to torch's own unpickler, which copies.
        Hostile(name, program(pickled + b"h\0h\1R" * 2_000), COPIED, LISTING, LISTING)
        for name, pickled in {
            "one list in many ordered dicts": ORDERED + PAIRS,
            "one list in many sets": named("builtins", "set") + b"q\0" + NUMBERS,
            "one list in many sizes": named("torch", "Size") + b"q\0(" + ROW + b"tq\1",
            "one text in many codes": named("_codecs", "encode") + b"q\0" + LATIN,
            "one list in many sets of a type": FROM_TYPE + b"q\0" + OF_TYPE,
            "one bytearray in many sizes": LISTED + ZEROS + b"\x85q\1",
        }.items()
    ),
    *(
        Hostile(name, program(pickled), CUT, LISTING, LISTING)
        for name, pickled in {
            "one list as sizes of many": storage() + b"q\0" + ROW + SIZES + b"h\2h\3R" * 2_000,
            "one buffer in many sizes": LISTED + ZEROS + b"\x98\x85q\1" + b"h\0h\1R" * 2_000,
            "one long name in many globals": text("k" * 400_000) + GLOBALS,
        }.items()
    ),
    *(
        Hostile(f"one list in many sets, {name}", program(SETS + NUMBERS + step * 2_000), COPIED, LISTING, LISTING)
        for name, step in {
            "as new objects": b"h\0h\1\x81",
            "as new objects with options": b"h\0h\1}\x92",
            "as objects": b"(h\0h\2o",
        }.items()
    ),
    *(
        Hostile(f"{name} of 400 MiB, cut off", program(dict_of(a=opcode), protocol=5), CUT, READERS)
        for name, opcode in {
            "a bytearray": b"\x96" + struct.pack("<Q", 400 << 20),
            "bytes": b"\x8e" + struct.pack("<Q", 400 << 20),
            "a text": b"X" + struct.pack("<L", 400 << 20),
            "an integer": b"\x8b" + struct.pack("<L", 400 << 20),
        }.items()
    ),
]
