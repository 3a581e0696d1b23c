#!/usr/bin/env bash
# Chromium and a font with Korean, Japanese and Chinese signs, by the system's apt, where they are missing.
set -euo pipefail
command -v chromium >/dev/null && exit 0
missing="the browser tests need Chromium: apt-get install chromium fonts-noto-cjk"
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "$missing" >&2
  [ "${CI:-}" != true ] # elsewhere the tests skip
  exit
fi
apt-get update -qq -o Acquire::Retries=3 && apt-get install -y -qq -o Acquire::Retries=3 --no-install-recommends chromium fonts-noto-cjk >/dev/null || {
  echo "$missing" >&2
  [ "${CI:-}" != true ]
}
