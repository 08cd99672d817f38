"""`python -m flray` is `flray`."""

from flray.cli import main

if __name__ == "__main__":
    main()
