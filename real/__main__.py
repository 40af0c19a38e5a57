"""`torchrun -m real ...`."""

from real.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
