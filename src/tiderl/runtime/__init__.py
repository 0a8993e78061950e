"""asyncio orchestration over ports: the same files in real and in virtual time."""
