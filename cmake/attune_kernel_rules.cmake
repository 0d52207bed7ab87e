# How kernels are made of catalogues: included by the tree (generators/CMakeLists.txt) and, installed, by attune_add_kernels().
#
# Needs ATTUNE_PYTHON, ATTUNE_HALIDE_DIR, ATTUNE_HALIDE_GEN (the generator program's command) and ATTUNE_HALIDE_GEN_DEPENDS.
set(ATTUNE_RULES_DIR "${CMAKE_CURRENT_LIST_DIR}")
cmake_path(SET ATTUNE_GENERATOR_DIR NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../generators")

# MLIR's kernels are made by Debian's tools (mlir-22-tools, llvm-22), where these are installed.
set(ATTUNE_MLIR AUTO CACHE STRING "Kernels made by MLIR: AUTO (where its tools are found), ON or OFF")
set_property(CACHE ATTUNE_MLIR PROPERTY STRINGS AUTO ON OFF)
if(NOT ATTUNE_MLIR MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ATTUNE_MLIR is ${ATTUNE_MLIR}: expected AUTO, ON or OFF")
endif()
set(ATTUNE_MLIR_GENERATOR)
if(NOT ATTUNE_MLIR STREQUAL "OFF")
  set(missing)
  foreach(tool mlir-opt-22 mlir-translate-22 opt-22 llc-22 llvm-mc-22)
    string(TOUPPER "ATTUNE_${tool}" variable)
    string(REPLACE "-" "_" variable "${variable}")
    find_program(${variable} ${tool})
    if(NOT ${variable})
      list(APPEND missing ${tool})
    endif()
  endforeach()
  list(JOIN missing ", " missing)
  if(NOT missing)
    set(ATTUNE_MLIR_GENERATOR "${ATTUNE_GENERATOR_DIR}/mlir/attune_mlir_gen.py")
  elseif(ATTUNE_MLIR STREQUAL "ON")
    message(FATAL_ERROR "ATTUNE_MLIR is ON, but there is no ${missing}: expected the packages mlir-22-tools and llvm-22")
  else()
    message(STATUS "MLIR's kernels are left out: there is no ${missing} (packages mlir-22-tools and llvm-22)")
  endif()
endif()
set(mlir_dir "${ATTUNE_GENERATOR_DIR}/mlir")
file(GLOB ATTUNE_MLIR_SOURCES "${mlir_dir}/attune_mlir_gen.py" "${mlir_dir}/payload/*.py" "${mlir_dir}/schedules/*.mlir")
file(GLOB ATTUNE_MMA_SOURCES "${mlir_dir}/attune_mma_gen.py" "${mlir_dir}/mma/*.py")

# attune_object(FUNCTION FROM COMMAND word… DEPENDS file…): an object and what it says of its memory, by the command.
function(attune_object function from)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "COMMAND;DEPENDS")
  set(object "${kernel_dir}/${function}.o")
  set(scratch "${kernel_dir}/${function}.scratch.inc")
  add_custom_command(
    OUTPUT "${object}" "${scratch}"
    COMMAND ${arg_COMMAND} --object "${object}" --scratch "${scratch}"
    DEPENDS ${arg_DEPENDS}
    COMMENT "${from}: ${function}"
    VERBATIM)
  set(objects ${objects} "${object}" PARENT_SCOPE)
  set(scratches ${scratches} "${scratch}" PARENT_SCOPE)
endfunction()
function(attune_halide_object function)
  set(plugins ${ARGN})
  list(FILTER plugins INCLUDE REGEX "\\.mod\\.so$")
  attune_object(${function} Halide COMMAND ${ATTUNE_HALIDE_GEN} ${ARGN} DEPENDS ${ATTUNE_HALIDE_GEN_DEPENDS} ${plugins})
  set(objects ${objects} PARENT_SCOPE)
  set(scratches ${scratches} PARENT_SCOPE)
endfunction()
# A plug-in of the generator program from a file of user functions.
function(attune_user_function source plugin)
  set(compile "${ATTUNE_RULES_DIR}/compile_mod.py")
  add_custom_command(
    OUTPUT "${plugin}"
    COMMAND "${ATTUNE_PYTHON}" "${compile}" --halide "${ATTUNE_HALIDE_DIR}" "${source}" -o "${plugin}" --cxx "${CMAKE_CXX_COMPILER}"
    DEPENDS "${source}" "${compile}" "${ATTUNE_GENERATOR_DIR}/halide/include/attune/mods.h"
    COMMENT "User functions: ${source}"
    VERBATIM)
endfunction()
# The parameters of user functions, for the registry.
function(attune_user_params file)
  set(plugins ${ARGN})
  list(FILTER plugins INCLUDE REGEX "\\.mod\\.so$")
  add_custom_command(
    OUTPUT "${kernel_dir}/${file}"
    COMMAND ${ATTUNE_HALIDE_GEN} --describe "${kernel_dir}/${file}" ${ARGN}
    DEPENDS ${ATTUNE_HALIDE_GEN_DEPENDS} ${plugins}
    COMMENT "Parameters of user functions: ${file}"
    VERBATIM)
  set(scratches ${scratches} "${kernel_dir}/${file}" PARENT_SCOPE)
endfunction()
macro(attune_mlir_object function)
  attune_object(${function} MLIR COMMAND "${ATTUNE_PYTHON}" "${ATTUNE_MLIR_GENERATOR}" ${ARGN} DEPENDS ${ATTUNE_MLIR_SOURCES})
endmacro()
# With the object, what an assembler says of the code for the device.
function(attune_device_object function)
  set(stem "${kernel_dir}/${function}")
  set(plugins ${ARGN})
  list(FILTER plugins INCLUDE REGEX "\\.mod\\.so$")
  add_custom_command(
    OUTPUT "${stem}.o" "${stem}.scratch.inc" "${stem}.launches"
    COMMAND ${ATTUNE_HALIDE_GEN} ${ARGN} --object "${stem}.o" --scratch "${stem}.scratch.inc" --launches "${stem}.launches"
    DEPENDS ${ATTUNE_HALIDE_GEN_DEPENDS} ${plugins}
    COMMENT "Halide: ${function}"
    VERBATIM)
  set(assembler)
  if("${ARGN}" MATCHES "-cuda-" AND ATTUNE_PTXAS)
    set(assembler --ptxas "${ATTUNE_PTXAS}" --source "${stem}.o" --keep "${stem}")
  endif()
  add_custom_command(
    OUTPUT "${stem}.code.inc"
    COMMAND "${ATTUNE_PYTHON}" "${ATTUNE_RULES_DIR}/device_code.py" --launches "${stem}.launches" --out "${stem}.code.inc" ${assembler}
    DEPENDS "${stem}.launches" "${ATTUNE_RULES_DIR}/device_code.py"
    COMMENT "Device code: ${function}"
    VERBATIM)
  set(objects ${objects} "${stem}.o" PARENT_SCOPE)
  set(scratches ${scratches} "${stem}.scratch.inc" "${stem}.code.inc" PARENT_SCOPE)
endfunction()
# PTX of a tile of a tensor core kernel, and what ptxas says of it. One text, for sm_80, serves later devices too: that for sm_90
# differs in three instructions before the loop, and a text takes 80 KB of the archive.
function(attune_mma_ptx kernel tile)
  set(name "${kernel}_${tile}")
  set(stem "${kernel_dir}/${name}")
  set(ptx ${ptx} "${stem}.ptx")
  add_custom_command(
    OUTPUT "${stem}.ptx" "${stem}.launches"
    COMMAND "${ATTUNE_PYTHON}" "${ATTUNE_GENERATOR_DIR}/mlir/attune_mma_gen.py" mlir_mma ${name} sm_80 ${ARGN} --output "${stem}.ptx"
            --launches "${stem}.launches"
    DEPENDS ${ATTUNE_MMA_SOURCES}
    COMMENT "MLIR: ${name}"
    VERBATIM)
  set(assembler)
  if(ATTUNE_PTXAS)
    set(assembler --ptxas "${ATTUNE_PTXAS}" --source "${stem}.ptx")
  endif()
  add_custom_command(
    OUTPUT "${stem}.code.inc"
    COMMAND "${ATTUNE_PYTHON}" "${ATTUNE_RULES_DIR}/device_code.py" --launches "${stem}.launches" --out "${stem}.code.inc" --prefix "${tile} " ${assembler}
    DEPENDS "${stem}.launches" "${stem}.ptx" "${ATTUNE_RULES_DIR}/device_code.py"
    COMMENT "Device code: ${name}"
    VERBATIM)
  set(ptx ${ptx} PARENT_SCOPE)
  set(scratches ${scratches} "${stem}.code.inc" PARENT_SCOPE)
endfunction()

# attune_kernels_from(DIR catalogue.py's arguments …): writes DIR/kernels.cpp and the rules for what it includes and calls. Sets,
# for the caller: objects, and scratches, which kernels.cpp includes.
function(attune_kernels_from kernel_dir)
  execute_process(
    COMMAND "${ATTUNE_PYTHON}" "${ATTUNE_RULES_DIR}/catalogue.py" --out "${kernel_dir}" --autoschedulers "${ATTUNE_HALIDE_DIR}/lib64"
            --mlir-generator "${ATTUNE_MLIR_GENERATOR}" ${ARGN}
    RESULT_VARIABLE failed ERROR_VARIABLE message)
  if(failed)
    message(FATAL_ERROR "${message}")
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${ATTUNE_RULES_DIR}/catalogue.py")
  set(objects)
  set(scratches)
  set(ptx)
  include("${kernel_dir}/kernels.cmake")
  list(APPEND scratches ${ptx}) # the registry holds their text
  set(objects ${objects} PARENT_SCOPE)
  set(scratches ${scratches} PARENT_SCOPE)
endfunction()
