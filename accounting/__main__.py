"""``python -m accounting`` is the command ``sixnd``."""

from accounting.cli import main

main()
