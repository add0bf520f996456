"""`python -m chatkv.app`."""

from chatkv.app.cli import main

if __name__ == "__main__":
    main()
