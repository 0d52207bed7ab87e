# attune_add_kernels(<target> CATALOGUE file.json … [ISAS isa …] [DEVICES device …] [SCORE_MOD file.cpp …] [MASK_MOD file.cpp …])
#
# Makes the kernels of the catalogues (docs/kernels.md), of the given ISAS (all, if none is given) and DEVICES (cpu), and adds
# them to <target>, an executable or a library of the calling directory, with the runtime that they need (attune::runtime, which
# has no kernels of its own). They are in the registry when the target is loaded; for a static library, <target>_kernels.h
# declares attune_register_<target>().
#
# SCORE_MOD and MASK_MOD are files of user functions (attune/mods.h, docs/kernels.md), which go into these kernels; problems ask
# for them by their names (attune_problem.mods), which are those of the files.
#
# The kernels' compiler, Halide 21, is taken from the Python in ATTUNE_PYTHON (default: what find_package(Python3) finds), or
# from the folder ATTUNE_HALIDE_DIR. It is needed while building only.
cmake_policy(PUSH)
cmake_policy(VERSION 3.28)

function(attune_add_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "CATALOGUE;ISAS;DEVICES;SCORE_MOD;MASK_MOD")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "attune_add_kernels(${target}): unexpected ${arg_UNPARSED_ARGUMENTS}: expected CATALOGUE, ISAS, DEVICES, SCORE_MOD or MASK_MOD")
  endif()
  if(NOT TARGET ${target})
    message(FATAL_ERROR "attune_add_kernels(${target}): there is no target ${target}: expected one that add_executable or add_library made")
  endif()
  get_target_property(folder ${target} SOURCE_DIR)
  if(NOT folder STREQUAL CMAKE_CURRENT_SOURCE_DIR)
    message(FATAL_ERROR "attune_add_kernels(${target}): the target is of ${folder}: expected one of this folder, ${CMAKE_CURRENT_SOURCE_DIR}")
  endif()
  if(NOT arg_CATALOGUE)
    message(FATAL_ERROR "attune_add_kernels(${target}): CATALOGUE is missing: expected a file")
  endif()
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(NOT "CXX" IN_LIST languages)
    message(FATAL_ERROR "attune_add_kernels(${target}): the project has the languages ${languages}: expected CXX among them")
  endif()
  if(NOT arg_DEVICES)
    set(arg_DEVICES cpu)
  endif()
  if(NOT arg_DEVICES STREQUAL "cpu" AND NOT attune_HAS_DEVICES)
    message(FATAL_ERROR "attune_add_kernels(${target}): DEVICES is ${arg_DEVICES}: expected cpu, since attune was built with ATTUNE_GPU=OFF")
  endif()
  set(files)
  foreach(file ${arg_CATALOGUE})
    cmake_path(ABSOLUTE_PATH file NORMALIZE)
    if(NOT EXISTS "${file}")
      message(FATAL_ERROR "attune_add_kernels(${target}): CATALOGUE is ${file}: there is no such file")
    endif()
    list(APPEND files "${file}")
  endforeach()
  set(mods)
  foreach(kind SCORE_MOD MASK_MOD)
    foreach(file ${arg_${kind}})
      cmake_path(ABSOLUTE_PATH file NORMALIZE)
      if(NOT EXISTS "${file}")
        message(FATAL_ERROR "attune_add_kernels(${target}): ${kind} is ${file}: there is no such file")
      endif()
      string(TOLOWER "--${kind}" option)
      string(REPLACE "_" "-" option "${option}")
      list(APPEND mods "${option}=${file}")
    endforeach()
  endforeach()

  attune_find_halide()
  set(ATTUNE_HALIDE_GEN "${CMAKE_COMMAND}" -E env "LD_LIBRARY_PATH=${ATTUNE_HALIDE_DIR}/lib64" "$<TARGET_FILE:attune::attune-halide-gen>")
  set(ATTUNE_HALIDE_GEN_DEPENDS attune::attune-halide-gen)
  include("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/attune_kernel_rules.cmake")
  if("cuda" IN_LIST arg_DEVICES)
    find_program(ATTUNE_PTXAS ptxas PATHS /usr/local/cuda/bin /opt/cuda/bin)
  endif()

  string(MAKE_C_IDENTIFIER "${target}" name)
  set(dir "${CMAKE_CURRENT_BINARY_DIR}/attune-${name}")
  list(TRANSFORM arg_ISAS PREPEND --isa= OUTPUT_VARIABLE isas)
  list(TRANSFORM arg_DEVICES PREPEND --device= OUTPUT_VARIABLE devices)
  get_target_property(program attune::attune-halide-gen LOCATION)
  attune_kernels_from("${dir}" --set ${name} --generator "${program}" ${isas} ${devices} ${mods} ${files})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})

  set(source "${dir}/kernels.cpp")
  set_source_files_properties("${source}" PROPERTIES OBJECT_DEPENDS "${scratches}" INCLUDE_DIRECTORIES "${dir};${ATTUNE_RULES_DIR}/../runtime"
                                                     COMPILE_OPTIONS -std=c++20)
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_sources(${target} PRIVATE "${source}" ${objects})
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${dir}>")
  target_link_libraries(${target} PUBLIC attune::runtime)
endfunction()

# Sets ATTUNE_PYTHON and ATTUNE_HALIDE_DIR for the caller.
function(attune_find_halide)
  if(NOT ATTUNE_PYTHON)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    set(ATTUNE_PYTHON "${Python3_EXECUTABLE}")
  endif()
  if(NOT ATTUNE_HALIDE_DIR)
    execute_process(COMMAND "${ATTUNE_PYTHON}" -c "import halide; print(halide.install_dir())" OUTPUT_VARIABLE ATTUNE_HALIDE_DIR
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT EXISTS "${ATTUNE_HALIDE_DIR}/lib64/libHalide.so")
    message(FATAL_ERROR "attune_add_kernels: ATTUNE_PYTHON is ${ATTUNE_PYTHON} and ATTUNE_HALIDE_DIR '${ATTUNE_HALIDE_DIR}': expected a Python "
                        "that has the package halide (pip install halide==21.0.0), or the folder of Halide 21 with lib64/libHalide.so")
  endif()
  set(ATTUNE_PYTHON "${ATTUNE_PYTHON}" PARENT_SCOPE)
  set(ATTUNE_HALIDE_DIR "${ATTUNE_HALIDE_DIR}" PARENT_SCOPE)
endfunction()
cmake_policy(POP)
