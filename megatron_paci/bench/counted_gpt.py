"""tiny_gpt.py that counts the memory of messages; see ``memory.py``. ::

    counted_gpt.py --count-messages FOLDER <tiny_gpt.py's flags>

``FOLDER/messages<rank>.json`` receives what ``MessageMeter.figures`` returns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from megatron_paci.bench import tiny_gpt
from megatron_paci.bench.message_memory import MessageMeter


def main() -> None:
    """Parse the flag, train, write."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--count-messages", type=Path, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    meter = MessageMeter()
    meter.install()
    try:
        tiny_gpt.main()
    finally:
        meter.uninstall()
    path = options.count_messages / f"messages{os.environ['RANK']}.json"
    path.write_text(json.dumps(meter.figures()))


if __name__ == "__main__":
    main()
