"""``python -m roamc`` is the command line."""

from roamc.cli.commands import main

if __name__ == "__main__":
    main()
