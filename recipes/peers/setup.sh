#!/usr/bin/env bash
# The other engines, each in an environment of its own, and the demo checkpoint in their formats:
#   recipes/peers/setup.sh ENV_FOLDER [NAME...]      names: transformers openvino vllm llama.cpp; all of them if none is given
# TARGET=FOLDER takes another checkpoint, and none to draft; DTYPE=bf16 another dtype than f32.
# What is there already is left alone. Needs Python 3.11 or newer, a C++ compiler, 7 GB, and half an hour on two cores.
# TORCH chooses PyTorch's build, as in the Makefile; the CPU build is enough, and the only one that vLLM's CPU build takes.
set -euo pipefail
envs=${1:?usage: recipes/peers/setup.sh ENV_FOLDER [NAME...]}
shift
here=$(cd "$(dirname "$0")" && pwd)
declare -A models=([target]="$here/../../tests/models/demo" [draft]="$here/../../tests/models/demo-draft")
[[ ${TARGET:-} ]] && models=([target]="$(cd "$TARGET" && pwd)")
dtype=${DTYPE:-f32}
mkdir -p "$envs/checkpoints"
envs=$(cd "$envs" && pwd)
source="${models[target]} $dtype"
[[ -f $envs/checkpoints/source ]] || echo "$source" > "$envs/checkpoints/source"
[[ $(< "$envs/checkpoints/source") == "$source" ]] || {
    echo "$envs/checkpoints is of $(< "$envs/checkpoints/source"): take another folder for $source" >&2; exit 1
}
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1

say() { echo "== $*"; }

environment() { # NAME: made again when its pins change
    local pins="$here/requirements/$1.txt"
    cmp --silent "$pins" "$envs/$1/.ready" && { say "$1 is there"; return; }
    say "$1: $(tr '\n' ' ' < "$pins")"
    "${PYTHON:-python3}" -m venv "$envs/$1"
    # First and alone, and pinned again after that: an open range brings the newest build, and with it gigabytes of CUDA libraries.
    grep -q '^torch==' "$pins" && "$envs/$1/bin/pip" install --quiet ${TORCH:-$(grep '^torch==' "$pins")}
    "$envs/$1/bin/pip" install --quiet --requirement "$pins"
    # Built for another build of PyTorch they fail at import, and text needs none of them.
    "$envs/$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2> /dev/null
    cp "$pins" "$envs/$1/.ready"
}

make_transformers() { environment transformers; }

make_vllm() { # our plug-in without its dependencies: vLLM brings them, in versions of its own
    environment vllm
    "$envs/vllm/bin/python" -c "import speculon" 2> /dev/null ||
        "$envs/vllm/bin/pip" install --quiet --no-deps --editable "$here/../.."
}

make_openvino() {
    environment openvino
    for model in "${!models[@]}"; do
        local out="$envs/checkpoints/openvino/$model"
        [[ -f $out/openvino_tokenizer.xml ]] && continue
        say "$model for OpenVINO, in fp32"
        "$envs/openvino/bin/optimum-cli" export openvino --model "${models[$model]}" --task text-generation-with-past \
            --weight-format "${dtype/f32/fp32}" "$out"
    done
}

make_llama.cpp() { # its sources come in the package of its Python binding; its converter needs torch and transformers
    environment llama.cpp
    environment transformers
    local home="$envs/llama.cpp" source
    [[ -d $home/source ]] || {
        say "the sources of llama.cpp"
        rm -rf "$home/download" && mkdir "$home/download"
        "$home/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$home/download" \
            "$(grep '^llama-cpp-python' "$here/requirements/llama.cpp.source.txt")"
        tar --extract --gzip --directory "$home/download" --file "$home"/download/*.tar.gz
        mv "$home"/download/*/vendor/llama.cpp "$home/source"
    }
    [[ -x $home/build/bin/llama-server ]] || {
        say "building llama-server"
        "$home/bin/cmake" -S "$home/source" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
            -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
        "$home/bin/cmake" --build "$home/build" --target llama-server --parallel "${JOBS:-2}"
    }
    mkdir -p "$envs/checkpoints/gguf"
    for model in "${!models[@]}"; do
        local out="$envs/checkpoints/gguf/$model.gguf"
        [[ -f $out ]] && continue
        say "$model for llama.cpp, in $dtype"
        "$envs/transformers/bin/python" "$here/to_gguf.py" "$home/source" "${models[$model]}" "$out" "$dtype"
    done
}

for name in "${@:-transformers openvino vllm llama.cpp}"; do
    for one in $name; do "make_$one"; done
done
say "ready: python recipes/peers/run.py $envs"
