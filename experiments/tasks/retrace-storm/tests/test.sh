#!/bin/sh
exec python3 -I /tests/verify.py
