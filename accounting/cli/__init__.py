"""The command ``sixnd``: exact counts for a config, and laws of loss, as tables or as JSON.

Bad input is one line on standard error and exit code 2.
"""

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

import click

from accounting import __version__
from accounting.cli.audit import audit
from accounting.cli.flops import flops
from accounting.cli.laws import fit, optimum
from accounting.cli.memory import memory
from accounting.cli.params import params
from accounting.cli.rates import mfu, time


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sixnd")
def cli() -> None:
    """Exact counts for decoder-only language models, and what their files hold."""


for command in (params, flops, memory, time, mfu, optimum, fit, audit):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command; bad input becomes one line on standard error."""
    from accounting.files import InputError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may have letters that a terminal lacks
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"sixnd: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except InputError as error:
        click.echo(f"sixnd: {error}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except OSError as error:
        # What the buffer still holds cannot be written either, and is not tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"sixnd: standard output: {(error.strerror or 'cannot be written').lower()}", err=True)
        sys.exit(1)
