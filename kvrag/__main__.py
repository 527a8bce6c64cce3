"""``python -m kvrag``: the command line, where its script is not on the path."""

from kvrag.cli.app import main

if __name__ == "__main__":
    main()
