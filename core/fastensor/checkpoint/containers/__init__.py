"""The containers of checkpoints: what each can do, which there are, and which one a file or a directory has.

A container is a module with the functions of :class:`FileContainer`, or of :class:`DirectoryContainer`, and a line in
``REGISTERED`` or ``OF_DIRECTORIES``. The module is imported when a checkpoint of it is met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, cast

from fastensor.checkpoint.reading.opened import OpenedFile, read_exactly
from fastensor.errors import CorruptCheckpointError
from fastensor.files.importing import imported
from fastensor.stitch.parts import LOCAL_SIGNATURE, Part
from fastensor.stitch.signatures import (
    LEGACY_AS_TEXT,
    LEGACY_MAGIC,
    LEGACY_MAGIC_WITHIN,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    SAFETENSORS_SUFFIX,
    SNIFFED_NBYTES,
    refuse_foreign,
)

if TYPE_CHECKING:
    from contextlib import ExitStack

    from fastensor.checkpoint.containers import legacy_file, safetensors_file, torch_file
    from fastensor.checkpoint.dcp import container as dcp_container
    from fastensor.checkpoint.location import Location
    from fastensor.checkpoint.progress import Progress
    from fastensor.checkpoint.reading.request import Loaded, LoadRequest
    from fastensor.checkpoint.tools.catalog import Catalog
    from fastensor.checkpoint.tools.comparing import VerifyReport
    from fastensor.checkpoint.tools.contents import OpenCheckpoint
    from fastensor.checkpoint.tools.conversion.settings import ConvertSettings
    from fastensor.checkpoint.tools.conversion.sources import ConversionSource
    from fastensor.checkpoint.writing.report import SaveReport
    from fastensor.select.transfer import BackendChoice

Container: TypeAlias = Literal["torch", "safetensors", "legacy"]
"""``torch`` is the zip archive that ``torch.save`` writes, ``legacy`` are the files that torch wrote before 1.6."""


class ToCompare(NamedTuple):
    """The parts of a file that :func:`fastensor.verify` compares with their checksums."""

    parts: Sequence[Part]
    compared: Sequence[int] = ()
    """Sizes of other parts, which cannot be read one by one."""
    uncompared: int = 0
    """Number of other parts, which carry no checksum."""
    compare_others: Callable[[], object] = lambda: None
    """Compares the other parts, if they are yet to be compared."""


class FileContainer(Protocol):
    """One container: a module. Nothing but :meth:`load` runs code of a file, and that only as ``torch.load`` does.

    All functions raise :class:`~fastensor.errors.CorruptCheckpointError` for a damaged file,
    :class:`~fastensor.errors.NotACheckpointError` for one that holds something else, and
    :class:`~fastensor.errors.CheckpointReadError` if the operating system fails to deliver bytes.
    """

    def load(self, file: OpenedFile, request: LoadRequest) -> Loaded:
        """:func:`fastensor.load`, without ``into``."""

    def read_catalog(self, file: OpenedFile, *, verify: bool) -> Catalog:
        """Catalog of a file: its tensors and objects, and where they are.

        Args:
            file: the file.
            verify: whether to compare what says so with its checksum.

        Raises:
            UnsupportedContentError: only torch can read the file, and only whole.
        """

    def to_compare(self, file: OpenedFile) -> ToCompare:
        """The parts of a file that carry checksums, or could."""

    def foreign_code(self, file: OpenedFile) -> tuple[str, ...]:
        """The functions and classes that a file names and ``weights_only=True`` refuses; or, if it refuses the file as
        a whole, the reason."""


class DirectoryContainer(Protocol):
    """A container whose checkpoints are directories: a module, for the tools. No code of a checkpoint is run."""

    def verify(self, location: Location, backend: BackendChoice, progress: Progress) -> VerifyReport:
        """:func:`fastensor.verify`."""

    def open_checkpoint(self, location: Location, stack: ExitStack, backend: BackendChoice) -> OpenCheckpoint:
        """See :func:`fastensor.checkpoint.tools.contents.open_checkpoint`."""

    def open_source(self, location: Location, settings: ConvertSettings, stack: ExitStack) -> ConversionSource:
        """See :func:`fastensor.checkpoint.tools.conversion.sources.open_source`."""

    def left_out(self, source: Location, settings: ConvertSettings) -> tuple[str, ...]:
        """Names of what a checkpoint of this container would not hold of a source of :func:`fastensor.convert`."""

    def write(self, source: Location, target: Location, settings: ConvertSettings, progress: Progress) -> SaveReport:
        """:func:`fastensor.convert` to this container."""


class RegisteredContainer(NamedTuple):
    """A container of files."""

    module: str
    """Its module in this folder."""
    begins: Callable[[bytes, int], bool]
    """True if a file is one of it, by its first :data:`SNIFFED_NBYTES` bytes and its size."""
    suffix: str = ""
    """The ending of the names of its files, which counts where their bytes say nothing."""


def _begins_as_safetensors(start: bytes, nbytes: int) -> bool:
    length = int.from_bytes(start[:LENGTH_NBYTES], "little")
    fits = LENGTH_NBYTES + length <= nbytes and length <= MAX_HEADER_NBYTES
    return fits and start[LENGTH_NBYTES : LENGTH_NBYTES + 1] == b"{"


REGISTERED: dict[Container, RegisteredContainer] = {
    "torch": RegisteredContainer("torch_file", lambda start, nbytes: start.startswith(LOCAL_SIGNATURE)),
    "safetensors": RegisteredContainer("safetensors_file", _begins_as_safetensors, SAFETENSORS_SUFFIX),
    "legacy": RegisteredContainer(
        "legacy_file",
        lambda start, nbytes: LEGACY_MAGIC in start[:LEGACY_MAGIC_WITHIN] or start.startswith(LEGACY_AS_TEXT),
    ),
}
OF_DIRECTORIES = {"dcp": "fastensor.checkpoint.dcp.container"}
"""Modules of containers by name. What they import is large."""
if TYPE_CHECKING:
    _FIT: tuple[FileContainer, ...] = (torch_file, safetensors_file, legacy_file)
    _DIRECTORIES_FIT: tuple[DirectoryContainer, ...] = (dcp_container,)


def directory_container(name: str | None) -> DirectoryContainer | None:
    """The module of a container of directories; None if the name is none of one."""
    return cast(DirectoryContainer, imported(OF_DIRECTORIES[name])) if name in OF_DIRECTORIES else None


def container_at(location: Location) -> DirectoryContainer | None:
    """The module of the container of a directory; None if the location is no checkpoint that is a directory."""
    from fastensor.checkpoint.directories import metadata_names  # a load of a file needs nothing of it

    return directory_container("dcp" if metadata_names(location) else None)


def container_in(file: OpenedFile) -> FileContainer:
    """The module of a file's container. Raises as :func:`container_of`."""
    module = REGISTERED[container_of(file)].module
    return cast(FileContainer, imported(f"{__name__}.{module}"))


def recognize(start: bytes, nbytes: int) -> Container | None:
    """The container of a file, by its first bytes and its size; None if these say nothing.

    >>> recognize(b"PK\\x03\\x04.....", 1000), recognize(b"\\x30" + bytes(7) + b"{", 1000), recognize(b"\\x80\\x02", 9)
    ('torch', 'safetensors', None)
    """
    return next((name for name, one in REGISTERED.items() if one.begins(start, nbytes)), None)


def start_of(file: OpenedFile) -> bytes:
    """The first :data:`SNIFFED_NBYTES` bytes of a file, or all of it."""
    return read_exactly(file, 0, min(SNIFFED_NBYTES, file.nbytes))


def container_of(file: OpenedFile) -> Container:
    """The container of a file, by its first bytes, and, only where these say nothing, by its name.

    Raises:
        NotACheckpointError: the file is something else.
        CorruptCheckpointError: the file begins like nothing that is known.
    """
    start = start_of(file)
    container = recognize(start, file.nbytes)
    if container is None:
        refuse_foreign(start, file.where)
        name = file.where.lower()
        container = next((one for one, how in REGISTERED.items() if how.suffix and name.endswith(how.suffix)), None)
    if container is None:
        zeros = "" if any(start) else ": space was reserved for it, and the bytes never came"
        raise CorruptCheckpointError(
            f"{file.where}: found {start[:8]!r} at offset 0, but no zip archive of torch, no safetensors file and no "
            f"file of torch before 1.6 begins like that{zeros}; it was damaged, or has a format unknown here"
        )
    return container
