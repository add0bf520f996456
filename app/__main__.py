"""`python -m chatkv.app`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu-check"]:  # Before the libraries of the app, which a machine that is only lent may lack.
        from chatkv.app.gpu_check.command import main as check

        sys.exit(check(sys.argv[2:]))
    from chatkv.app.cli import main

    main()
