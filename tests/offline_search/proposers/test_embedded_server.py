from __future__ import annotations

from pathlib import Path

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from offline_search.proposers.embedded_server import CONCURRENT_REQUESTS, server_arguments


def test_vllm_takes_the_arguments_of_the_server() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(server_arguments(Path("model"), 8001))
    assert (options.model_tag, options.port) == ("model", 8001)
    assert options.max_num_seqs == CONCURRENT_REQUESTS
    # Otherwise white space may be most of a reply.
    assert options.structured_outputs_config.disable_any_whitespace
