# Read by the build of llama-cpp-python: only its library, without what llama.cpp's own programs share.
set(LLAMA_BUILD_COMMON OFF)
