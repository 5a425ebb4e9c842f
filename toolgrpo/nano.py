"""`python -m toolgrpo.nano`: build nano if it is not there yet, and print its folder."""

from toolgrpo.startup import prepare

if __name__ == "__main__":
    prepare()  # before anything imports PyTorch

    from toolgrpo.models.nano import ensure_nano

    print(ensure_nano())
