# Versions, arguments and labels come from pin.toml:
#
#   python3 scripts/imagebuild bake > build/bake.json
#   docker buildx bake -f docker/docker-bake.hcl -f build/bake.json
#
# Targets cu128 (the default) and cu130; the second can be had in a minute, without
# compiling, with BUILD_MODE=repack.

variable "IMAGE" {
  description = "Name of the image; the target's name becomes its tag"
  default     = "vllm-flint"
}

variable "TAG" {
  description = "Put before the target's name in the tag"
  default     = "local"
}

variable "BUILD_MODE" {
  default = "compile"
}

variable "SOURCE" {
  description = "git: a clone of the base's tag; archive: its source archive"
  default     = "git"
}

variable "JOBS" {
  description = "Compilers at once, each with about 4 GB"
  default     = "2"
}

variable "TORCH_INDEX_URL" {
  description = "PyTorch's own wheel index for CUDA 12.8"
  default     = ""
}

group "default" {
  targets = ["cu128"]
}

target "_image" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  target     = "runtime"
  args = {
    SOURCE          = SOURCE
    JOBS            = JOBS
    BUILD_MODE      = BUILD_MODE
    TORCH_INDEX_URL = TORCH_INDEX_URL
  }
}

target "cu128" {
  inherits = ["_image", "pin-cu128"]
  tags     = ["${IMAGE}:${TAG}-cu128"]
}

target "cu130" {
  inherits = ["_image", "pin-cu130"]
  tags     = ["${IMAGE}:${TAG}-cu130"]
}
