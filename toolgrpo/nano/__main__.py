"""`python -m toolgrpo.nano`: build nano if it is not there yet, and print its folder."""

from toolgrpo.nano import ensure_nano

if __name__ == "__main__":
    print(ensure_nano())
