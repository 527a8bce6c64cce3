"""Command line as ``python -m kvrag``, for when the script is not on the path."""

from kvrag.cli.app import main

if __name__ == "__main__":
    main()
