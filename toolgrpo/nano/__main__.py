"""`python -m toolgrpo.nano`: build nano if it is not there yet, and print its folder."""

from toolgrpo.startup import prepare

prepare()

from toolgrpo.nano import ensure_nano  # noqa: E402

if __name__ == "__main__":
    print(ensure_nano())
