"""``fastensor provision up|status|down``"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fastensor.cli.app import group
from fastensor.cli.commands.options import Json, size_in

_Address = Annotated[
    str | None,
    typer.Argument(metavar="ADDRESS", help="The address of the service; default: of the one that was started here."),
]


_provision = group("provision", "Start a data service, look at it, and end it.")


@_provision.command()
def up(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="MODULE:FUNCTION, which returns a dataset; an LMDB environment; or a pattern of paths or URLs.",
        ),
    ],
    cache: Annotated[str, typer.Option(metavar="SIZE", help="Memory for samples, such as 4GiB.")] = "1GiB",
    workers: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Processes that read and prepare; default: one for each CPU.")
    ] = None,
    before_cache: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Makes of a sample what is kept.")
    ] = None,
    after_cache: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Is called for each use of a sample.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of what happens before the cache.")] = 0,
    fingerprint: Annotated[
        str, typer.Option(metavar="TEXT", help="Identifies the samples, if the source does not.")
    ] = "",
    name: Annotated[str, typer.Option(metavar="TEXT", help="Tells services of the same samples apart.")] = "",
    engine: Annotated[
        Literal["embedded", "ray"], typer.Option(help="Processes of this machine, or actors of Ray.")
    ] = "embedded",
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The cluster of Ray; default: RAY_ADDRESS, or one of this machine.")
    ] = "",
    listen: Annotated[str, typer.Option(hidden=True)] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Return when the service has started.")] = False,
) -> int:
    """Start a data service, and keep it until Ctrl-C, or fastensor provision down.

    Prints the address that fastensor.provision.DataService.connect takes.
    """
    if listen:
        raise ValueError("--listen is gone: fastensor provision up --engine ray serves several machines")
    nbytes = size_in(cache, "--cache")
    from fastensor.cli import services

    wanted = services.Wanted(
        source=source,
        cache_nbytes=nbytes,
        workers=workers,
        before_cache=before_cache,
        after_cache=after_cache,
        seed=seed,
        fingerprint=fingerprint,
        name=name,
        engine=engine,
        address=address,
    )
    return services.up_detached(wanted) if detach else services.up(wanted)


@_provision.command()
def status(address: _Address = None, json: Json = False) -> int:
    """Show what a data service does: its cache, its servers, and what its clients get and wait for."""
    from fastensor.cli import services

    return services.status(address, json=json)


@_provision.command()
def down(address: _Address = None) -> int:
    """End a data service that was started by fastensor provision up.

    One that still has clients goes on for them, and ends with the last one. On Ray, it ends at once.
    """
    from fastensor.cli import services

    return services.down(address)
