"""Bytes that this process has sent over TCP, as the kernel counts them: what gloo really moves."""

import os
import socket
import struct

_ACKED = 120  # of struct tcp_info: tcpi_bytes_acked, payload that the other side has confirmed


def sent():
    """Payload bytes of all TCP connections that are open now."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if (
                    connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.type == socket.SOCK_STREAM
                ):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) >= _ACKED + 8:
                        total += struct.unpack_from("Q", info, _ACKED)[0]
        except OSError:  # closed meanwhile, or not TCP
            continue
    return total
