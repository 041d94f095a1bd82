#!/bin/sh
# Says what this machine lacks, one line each with what to install, and fails if anything is missing.
#
#   check_prerequisites.sh build     Python, venv, Python.h, a C++20 compiler
#   check_prerequisites.sh catch2    Catch2, or a network to download it from
#
# PYTHON (default python3) and CXX (default c++ or g++) choose the programs; VENV is the environment to be created.
set -u

python=${PYTHON:-python3}
missing=0

report() { # what, Debian packages, Fedora packages
  echo "missing: $1. Debian, Ubuntu: apt-get install $2. Fedora: dnf install $3." >&2
  missing=1
}

check_python() {
  if ! command -v "$python" >/dev/null 2>&1; then
    report "Python 3.10 or newer ($python)" "python3 python3-venv python3-dev" "python3 python3-devel"
    return
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    report "Python 3.10 or newer ($python is $("$python" -V 2>&1); choose another with PYTHON=)" \
      "python3.11 python3.11-venv python3.11-dev" "python3.11 python3.11-devel"
  dotted=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # Only for an environment that is still to be created.
  [ -x "${VENV:-.venv}/bin/python" ] || "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    report "ensurepip and venv for $python" "python$dotted-venv" "python3-libs"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
    report "Python.h for $python" "python$dotted-dev" "python3-devel"
}

check_compiler() {
  compiler=${CXX:-}
  for candidate in c++ g++ clang++; do
    [ -n "$compiler" ] || ! command -v "$candidate" >/dev/null 2>&1 || compiler=$candidate
  done
  if [ -z "$compiler" ] || ! command -v "${compiler%% *}" >/dev/null 2>&1; then
    report "a C++20 compiler (${compiler:-c++, g++, clang++})" "g++" "gcc-c++"
    return
  fi
  program='#include <concepts>
#include <span>
template <std::integral T> T first(std::span<const T> s) { return s[0]; }
int main() { const int a[] = {0}; return first(std::span<const int>(a)); }'
  # Unquoted on purpose: CXX may hold options.
  printf '%s\n' "$program" | $compiler -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1 ||
    report "C++20 in $compiler (g++ 11 or clang 14 have it; choose with CXX=)" "g++-12" "gcc-c++"
}

check_catch2() {
  for folder in /usr/include /usr/local/include $(echo "${CMAKE_PREFIX_PATH:-}" | tr ':;' '  '); do
    for header in catch.hpp catch_all.hpp; do
      [ ! -e "$folder/catch2/$header" ] && [ ! -e "$folder/include/catch2/$header" ] || return 0
    done
  done
  # Downloaded by an earlier build.
  [ -z "$(find build -path '*/catch2_include/catch2/catch.hpp' -size +0 2>/dev/null)" ] || return 0
  "$python" -c 'import socket; socket.create_connection(("raw.githubusercontent.com", 443), 5)' 2>/dev/null ||
    report "Catch2 (and no network to download it from)" "catch2" "catch-devel"
}

for group in "$@"; do
  case $group in
    build) check_python; check_compiler ;;
    catch2) check_catch2 ;;
    *) echo "unknown group: $group" >&2; exit 2 ;;
  esac
done
exit $missing
