"""Exit 0 if the worker in this container says that it is ready, else 1 with the reason."""

import os
import ssl
import sys
import urllib.error
import urllib.request


def main() -> int:
    secure = "KVFOLD_TLS_CERT" in os.environ
    url = f"{'https' if secure else 'http'}://127.0.0.1:{os.environ.get('KVFOLD_PORT', '8787')}/readyz"
    context = None
    if secure:  # its own certificate, under another name than 127.0.0.1
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=4, context=context):
            return 0
    except urllib.error.HTTPError as error:
        print(error.read(1000).decode(errors="replace"))
    except OSError as error:
        print(error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
