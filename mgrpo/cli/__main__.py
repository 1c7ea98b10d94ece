"""`python -m mgrpo.cli` is `mgrpo`."""

from mgrpo.cli import main

if __name__ == "__main__":
    main()
