"""`python -m diptych` is the `diptych` command."""

from diptych.cli import main

main()
